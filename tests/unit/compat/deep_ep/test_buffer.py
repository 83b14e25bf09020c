"""Buffer where no GPU is needed: DeepEP's names, arguments, defaults and settings."""

import inspect
from typing import get_args

import pytest
import torch

from eprt.compat import deep_ep
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
    "use_fp8": True,
    "expert_alignment": 1,
    "num_qps_per_rank": 24,
    "allow_nvlink_for_low_latency_mode": True,
}
REQUIRED = {
    "low_latency_dispatch": 4,
    "low_latency_combine": 4,
    "dispatch": 1,
    "combine": 2,
    "get_dispatch_layout": 2,
    "clean_low_latency_buffer": 3,
    "low_latency_update_mask_buffer": 1,
    "low_latency_query_mask_buffer": 1,
    "get_next_low_latency_combine_buffer": 1,
    "get_low_latency_rdma_size_hint": 4,
    "get_dispatch_config": 1,
    "get_combine_config": 1,
    "set_num_sms": 1,
    "get_local_buffer_tensor": 1,
}
RESULTS = {"get_dispatch_layout": 5, "dispatch": 6, "combine": 3, "low_latency_dispatch": 5, "low_latency_combine": 3}
STATICS = {
    "get_low_latency_rdma_size_hint",
    "get_dispatch_config",
    "get_combine_config",
    "set_num_sms",
    "capture",
    "is_sm90_compiled",
}


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
        "num_sms",
        "num_max_nvl_chunked_send_tokens",
        "num_max_nvl_chunked_recv_tokens",
        "num_max_rdma_chunked_send_tokens",
        "num_max_rdma_chunked_recv_tokens",
    ]


def test_overlap_takes_the_arguments_of_deep_eps_branch():
    parameters = inspect.signature(deep_ep.Buffer.low_latency_combine).parameters.values()
    ours = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert ours == ["overlap", "packed_recv_count", "comp_signal", "block_m", "threshold", "num_sms"]


# As SGLang's dispatcher and vLLM's managers make them: how many arguments without a name, and the names.
FRAMEWORK_CALLS = [
    ("__init__", 3, "low_latency_mode num_qps_per_rank allow_mnnvl"),
    ("__init__", 0, "group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank explicitly_destroy"),
    (
        "__init__",
        0,
        "group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank "
        "allow_nvlink_for_low_latency_mode allow_mnnvl explicitly_destroy enable_shrink",
    ),
    ("get_dispatch_layout", 2, "previous_event async_finish allocate_on_comm_stream"),
    (
        "dispatch",
        1,
        "topk_idx topk_weights num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank "
        "num_tokens_per_expert previous_event async_finish allocate_on_comm_stream expert_alignment config",
    ),
    (
        "dispatch",
        0,
        "x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank num_tokens_per_expert "
        "topk_idx topk_weights expert_alignment config previous_event async_finish allocate_on_comm_stream",
    ),
    ("combine", 2, "async_finish previous_event allocate_on_comm_stream config"),
    ("combine", 0, "x handle topk_weights config previous_event async_finish allocate_on_comm_stream"),
    ("low_latency_dispatch", 4, "use_fp8 round_scale use_ue8m0 async_finish return_recv_hook"),
    (
        "low_latency_combine",
        0,
        "x topk_idx topk_weights handle async_finish return_recv_hook overlap packed_recv_count "
        "comp_signal block_m threshold num_sms",
    ),
    ("low_latency_combine", 4, "async_finish zero_copy return_recv_hook out"),
    ("clean_low_latency_buffer", 3, ""),
    ("get_local_buffer_tensor", 0, "dtype use_rdma_buffer"),
]


@pytest.mark.parametrize("call, unnamed, names", FRAMEWORK_CALLS)
def test_calls_of_sglang_and_vllm_fit(call, unnamed, names):
    signature = inspect.signature(getattr(deep_ep.Buffer, call))
    signature.bind("self", *range(unnamed), **dict.fromkeys(names.split()))


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


def test_low_latency_memory_is_a_third_of_deep_eps_at_most():
    assert 0 < deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 288) < 2147e6 / 3


def test_a_buffer_without_a_gpu_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs an NVIDIA GPU and a CUDA build of torch"):
        deep_ep.Buffer(EPGroup.single())
