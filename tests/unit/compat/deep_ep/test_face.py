"""The DeepEP face where no GPU is needed: names, settings, and the order of hooks."""

import inspect
import runpy
import subprocess
import sys
from typing import Any, get_args

import pytest
import torch

from eprt import env
from eprt.compat import deep_ep
from eprt.compat.deep_ep.checks import BufferChecks
from eprt.compat.deep_ep.low_latency import PendingHooks
from eprt.ep.group.group import EPGroup

CALLS = {
    "low_latency_dispatch": "x topk_idx num_max_dispatch_tokens_per_rank num_experts "
    "cumulative_local_expert_recv_stats dispatch_wait_recv_cost_stats use_fp8 round_scale use_ue8m0 async_finish "
    "return_recv_hook",
    "low_latency_combine": "x topk_idx topk_weights handle use_logfmt zero_copy async_finish return_recv_hook out "
    "combine_wait_recv_cost_stats",
    "dispatch": "x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank num_tokens_per_expert topk_idx "
    "topk_weights expert_alignment num_worst_tokens config previous_event async_finish allocate_on_comm_stream",
    "combine": "x handle topk_weights bias config previous_event async_finish allocate_on_comm_stream",
    "get_dispatch_layout": "topk_idx num_experts previous_event async_finish allocate_on_comm_stream",
    "clean_low_latency_buffer": "num_max_dispatch_tokens_per_rank hidden num_experts",
    "low_latency_update_mask_buffer": "rank_to_mask mask",
    "low_latency_query_mask_buffer": "mask_status",
    "low_latency_clean_mask_buffer": "",
    "get_next_low_latency_combine_buffer": "handle",
    "get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
    "set_num_sms": "new_num_sms",
    "get_local_buffer_tensor": "dtype size offset use_rdma_buffer",
    "__init__": "group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank "
    "allow_nvlink_for_low_latency_mode allow_mnnvl use_fabric explicitly_destroy enable_shrink comm",
}
# Where it is neither None, False nor 0; and what must be given.
DEFAULTS = {
    "use_fp8": True, "expert_alignment": 1, "num_qps_per_rank": 24, "allow_nvlink_for_low_latency_mode": True,
}  # fmt: skip
REQUIRED = {
    "low_latency_dispatch": 4, "low_latency_combine": 4, "dispatch": 1, "combine": 2, "get_dispatch_layout": 2,
    "clean_low_latency_buffer": 3, "low_latency_update_mask_buffer": 1, "low_latency_query_mask_buffer": 1,
    "get_next_low_latency_combine_buffer": 1, "get_low_latency_rdma_size_hint": 4, "get_dispatch_config": 1,
    "get_combine_config": 1, "set_num_sms": 1, "get_local_buffer_tensor": 1,
}  # fmt: skip
RESULTS = {"get_dispatch_layout": 5, "dispatch": 6, "combine": 3, "low_latency_dispatch": 5, "low_latency_combine": 3}
STATICS = {
    "get_low_latency_rdma_size_hint", "get_dispatch_config", "get_combine_config", "set_num_sms", "capture",
    "is_sm90_compiled",
}  # fmt: skip


def parameters_of(call: str) -> list[inspect.Parameter]:
    """Without self, and without eprt's own and the overlap branch's, which have no place in the order."""
    parameters = inspect.signature(getattr(deep_ep.Buffer, call)).parameters.values()
    theirs = [p for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    return theirs if call in STATICS else theirs[1:]


@pytest.mark.parametrize("call", CALLS)
def test_arguments_have_deep_eps_names_order_and_defaults(call):
    parameters = parameters_of(call)
    assert [p.name for p in parameters] == CALLS[call].split()
    given, optional = parameters[: REQUIRED.get(call, 0)], parameters[REQUIRED.get(call, 0) :]
    assert all(p.default is inspect.Parameter.empty for p in given)
    for p in optional:
        assert p.default == DEFAULTS[p.name] if p.name in DEFAULTS else not p.default, p.name


@pytest.mark.parametrize("call", RESULTS)
def test_calls_return_as_many_values_as_deep_eps(call):
    returned = inspect.signature(getattr(deep_ep.Buffer, call)).return_annotation
    assert len(get_args(returned)) == RESULTS[call]


def test_what_frameworks_call_on_the_class_needs_no_buffer():
    assert all(isinstance(inspect.getattr_static(deep_ep.Buffer, name), staticmethod) for name in STATICS)
    parameters = list(inspect.signature(deep_ep.Config).parameters)
    assert parameters == [
        "num_sms", "num_max_nvl_chunked_send_tokens", "num_max_nvl_chunked_recv_tokens",
        "num_max_rdma_chunked_send_tokens", "num_max_rdma_chunked_recv_tokens",
    ]  # fmt: skip


def test_overlap_takes_the_arguments_of_deep_eps_branch():
    parameters = inspect.signature(deep_ep.Buffer.low_latency_combine).parameters.values()
    ours = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert ours == ["overlap", "packed_recv_count", "comp_signal", "block_m", "threshold", "num_sms"]


# As SGLang's dispatcher and vLLM's managers make them: how many arguments without a name, and the names.
FRAMEWORK_CALLS = [
    ("__init__", 3, "low_latency_mode num_qps_per_rank allow_mnnvl"),
    ("__init__", 0, "group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank explicitly_destroy"),
    ("__init__", 0, "group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank "
        "allow_nvlink_for_low_latency_mode allow_mnnvl explicitly_destroy enable_shrink"),
    ("get_dispatch_layout", 2, "previous_event async_finish allocate_on_comm_stream"),
    ("dispatch", 1, "topk_idx topk_weights num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank "
        "num_tokens_per_expert previous_event async_finish allocate_on_comm_stream expert_alignment config"),
    ("dispatch", 0, "x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank num_tokens_per_expert "
        "topk_idx topk_weights expert_alignment config previous_event async_finish allocate_on_comm_stream"),
    ("combine", 2, "async_finish previous_event allocate_on_comm_stream config"),
    ("combine", 0, "x handle topk_weights config previous_event async_finish allocate_on_comm_stream"),
    ("low_latency_dispatch", 4, "use_fp8 round_scale use_ue8m0 async_finish return_recv_hook"),
    ("low_latency_combine", 0, "x topk_idx topk_weights handle async_finish return_recv_hook overlap packed_recv_count "
        "comp_signal block_m threshold num_sms"),
    ("low_latency_combine", 4, "async_finish zero_copy return_recv_hook out"),
    ("clean_low_latency_buffer", 3, ""),
    ("get_local_buffer_tensor", 0, "dtype use_rdma_buffer"),
]  # fmt: skip


@pytest.mark.parametrize("call, unnamed, names", FRAMEWORK_CALLS)
def test_calls_of_sglang_and_vllm_fit(call, unnamed, names):
    signature = inspect.signature(getattr(deep_ep.Buffer, call))
    signature.bind("self", *range(unnamed), **dict.fromkeys(names.split()))


class OnGpu:
    """As much of a tensor as the checks look at, on a GPU that this machine need not have."""

    device = "cuda:0"

    def __init__(self, dtype: torch.dtype, *shape: int, contiguous: bool = True):
        self.dtype, self.shape, self._contiguous = dtype, torch.Size(shape), contiguous

    def is_contiguous(self) -> bool:
        return self._contiguous

    def data_ptr(self) -> int:
        return 0

    def get_device(self) -> int:
        return 0


def on_gpu(*args: Any, **kwargs: Any) -> Any:
    return OnGpu(*args, **kwargs)


def test_a_call_that_looks_like_the_last_good_one_is_not_checked_again_and_any_other_is(monkeypatch):
    checks, looked = BufferChecks(1, 2, 0), []
    monkeypatch.setattr(
        checks, "check_tensor", lambda *args: (looked.append(args[1]), BufferChecks.check_tensor(checks, *args))
    )

    def dispatch(dtype=torch.bfloat16, tokens=3, contiguous=True, idx_tokens=3, **changed) -> None:
        x, idx = on_gpu(dtype, tokens, 512, contiguous=contiguous), on_gpu(torch.int64, idx_tokens, 8)
        asked: dict[str, Any] = {"max_tokens": 4, "num_experts": 6, "formats": (True, True, True)} | changed
        checks.check_dispatch(x, idx, None, None, None, **asked, async_finish=False, return_recv_hook=False)

    dispatch()
    assert looked == ["x", "topk_idx"]
    dispatch()
    assert looked == ["x", "topk_idx"]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("x is torch.float32", {"dtype": torch.float32}), ("x is not contiguous", {"contiguous": False}),
        ("5 tokens", {"tokens": 5, "idx_tokens": 5}), ("topk_idx is torch.int64", {"idx_tokens": 2}),
        ("num_experts=7", {"num_experts": 7}), ("round_scale=True", {"formats": (True, False, True)}),
    ]  # fmt: skip
    for words, changed in cases:
        for _ in range(2):  # what was refused is not remembered
            with pytest.raises(ValueError, match=rf"\[rank 1/2\].*{words}"):
                dispatch(**changed)
    y, idx, weights = on_gpu(torch.bfloat16, 3, 8, 512), on_gpu(torch.int64, 3, 8), on_gpu(torch.float32, 3, 8)
    for num_tokens in (3, 3, 2):
        try:
            checks.check_combine(y, idx, weights, None, None, num_tokens, (3, 8, 512), 8, False, False)
        except ValueError as error:
            assert num_tokens == 2 and "3 tokens, but the handle is of a dispatch of 2" in str(error)
        else:
            assert num_tokens == 3


def test_num_sms_is_the_default_of_configs_and_must_be_even():
    before = deep_ep.Buffer.num_sms
    try:
        deep_ep.Buffer.set_num_sms(12)
        assert deep_ep.Buffer.get_dispatch_config(8).num_sms == deep_ep.Buffer.get_combine_config(8).num_sms == 12
        with pytest.raises(ValueError, match="num_sms=7: must be even"):
            deep_ep.Buffer.set_num_sms(7)
        assert deep_ep.Buffer.num_sms == 12
    finally:
        deep_ep.Buffer.num_sms = before


def test_config_refuses_queues_that_deep_ep_refuses():
    with pytest.raises(ValueError, match=r"nvl_chunked_send_tokens=8 .*recv_tokens=8"):
        deep_ep.Config(20, 8, 8)
    assert deep_ep.Config(24, 8, 256).get_nvl_buffer_size_hint(7168 * 2, 8) > 0
    assert deep_ep.Config().get_rdma_buffer_size_hint(7168 * 2, 8) == 0


def test_the_size_hint_follows_the_tokens_that_the_environment_names(monkeypatch):
    before = deep_ep.Config().get_nvl_buffer_size_hint(7168, 8)
    monkeypatch.setenv("EPRT_DEEP_EP_TOKENS", "8192")
    after = deep_ep.Config().get_nvl_buffer_size_hint(7168, 8)
    assert after == 2 * before > 3 * 8 * 8192 * 7168  # two results in fp8 and a combine in bf16, or one and one


def test_low_latency_memory_is_a_third_of_deep_eps_at_most():
    assert 0 < deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 288) < 2147e6 / 3


def test_a_buffer_without_a_gpu_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs an NVIDIA GPU and a CUDA build of torch"):
        deep_ep.Buffer(EPGroup.single())


def test_an_event_that_is_none_is_not_waited_for_silently():
    with deep_ep.EventOverlap():
        pass
    with pytest.raises(ValueError, match="async_finish"):
        deep_ep.EventOverlap().current_stream_wait()


def test_two_hooks_may_be_outstanding_and_each_is_called_once():
    pending = PendingHooks("low_latency_dispatch")
    first, second = pending.begin_call(True), pending.begin_call(True)
    with pytest.raises(RuntimeError, match="the hook of low_latency_dispatch number 1 has not been called"):
        pending.begin_call(False)
    pending.end_call(first)
    with pytest.raises(RuntimeError, match="number 1 has been called already"):
        pending.end_call(first)
    assert pending.is_pending(second) and pending.begin_call(False) == 3
    with pytest.raises(RuntimeError, match="number 2 has not been called"):
        pending.begin_call(True)


def test_a_folder_on_the_path_redirects_the_import_in_any_process(capsys):
    runpy.run_module("eprt.compat.deep_ep", run_name="__main__")
    environment = env.without_mpi() | {"PYTHONPATH": capsys.readouterr().out.strip()}
    program = (
        "import importlib.util as u; assert u.find_spec('deep_ep')\n"
        "import deep_ep, eprt.compat.deep_ep; from deep_ep import Buffer, Config, EventOverlap\n"
        "assert deep_ep is eprt.compat.deep_ep and u.find_spec('deep_ep')\n"
        "from deep_ep.utils import EventOverlap as E\n"
        "assert E is EventOverlap and deep_ep.topk_idx_t.is_signed and Buffer.is_sm90_compiled()"
    )
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
