"""What the host refuses before it launches anything, what it tells peers when it cannot go on, and what it does when
rows do not fit as it had guessed."""

import gc
import weakref
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eprt.compat.deep_ep import Buffer
from eprt.ep.errors import EPTimeoutError
from eprt.ep.nvlink.low_latency import Signal
from tests.fake_gpu import Group
from tests.unit.ep.nvlink.cases import EXPERTS, HIDDEN, MODES, K, T, make
from tests.unit.ep.nvlink.test_host_path import Rows


def test_a_guess_that_was_too_low_takes_no_room_from_what_came(gpu):
    rows = Rows(gpu, num_bytes=400 << 10)
    rows.coming = 1200  # with the guess they would not fit
    received = rows.dispatch()
    assert rows.launches() == [("count", 0, 0), ("dispatch", 2 * T, 1), ("dispatch", 1200, 0)]
    assert received.x_NH.shape[0] == 1200


def test_rows_beyond_the_guess_that_take_more_than_half_of_the_memory_are_copied_out(gpu):
    rows = Rows(gpu, num_bytes=1 << 20)
    rows.coming = 2000
    received = rows.dispatch()
    assert rows.launches()[1:] == [("dispatch", 2 * T, 1), ("dispatch", 2000, 0)]
    assert received.x_NH.shape == (2000, HIDDEN) and rows.used == 0
    assert rows.dispatch().x_NH.shape[0] == 2000, "there is room for as many again"


def test_without_any_room_left_peers_are_still_told_so(gpu):
    rows = Rows(gpu)
    pool = rows.exchange._pool
    held = [pool.take_block(pool.num_bytes)]
    with pytest.raises(ValueError, match="no room for 100 received rows"):
        rows.dispatch()
    assert rows.launches() == [("count", 0, 0), ("dispatch", 0, 0)]
    held.clear()
    assert rows.dispatch().x_NH.shape[0] == 100


def test_a_failure_is_told_by_the_shape_of_the_call_that_failed(gpu):
    rows = Rows(gpu)
    rows.dispatch(num_worst_rows=300)
    rows.exchange.kernels.failure.words[:] = (5, 0, 77, 6)  # found after the host had gone on
    rows.idx, rows.weights = rows.idx[:, :2].contiguous(), rows.weights[:, :2].contiguous()
    with pytest.raises(ValueError, match=r"\[rank 1/2\] dispatch: topk_idx\[1, 2\] = 77 is not in"):
        rows.dispatch()


def test_what_a_capture_cannot_wait_for_and_sizes_that_mean_nothing_are_named_before_any_launch(gpu, monkeypatch):
    rows = Rows(gpu)
    with pytest.raises(ValueError, match=r"\[rank 1/2\] dispatch: a static bound of -3 rows"):
        rows.dispatch(num_worst_rows=-3)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True)
    with pytest.raises(ValueError, match=r"\[rank 1/2\] dispatch: .*CUDA graph.*num_worst_tokens"):
        rows.dispatch()
    rows.x = rows.x[:, :0]
    with pytest.raises(ValueError, match=r"a row of x has 0 B"):
        rows.dispatch(num_worst_rows=300)
    assert gpu.launched == []


def off_by_two_bytes(*shape: int) -> torch.Tensor:
    return torch.empty(prod(shape) + 1, dtype=torch.bfloat16)[1:].view(shape)


def test_rows_that_begin_between_multiples_of_16_bytes_are_named_before_any_launch(gpu):
    rows = Rows(gpu)
    handle = rows.dispatch().handle
    gpu.clear()
    good, bad = torch.empty(100, HIDDEN).bfloat16(), off_by_two_bytes(100, HIDDEN)
    with pytest.raises(ValueError, match=r"\[rank 1/2\] combine's rows begin at .*multiple of 16"):
        rows.exchange.combine(bad, handle)
    with pytest.raises(ValueError, match=r"\[rank 1/2\] combine's bias begins? at .*multiple of 16"):
        rows.exchange.combine(good, handle, biases_TH=(off_by_two_bytes(T, HIDDEN),))
    assert gpu.launched == []


class Pairs:
    """A Buffer of rank 0 of 2, and low-latency calls."""

    def __init__(self):
        self.buffer = Buffer(Group(0, 2), low_latency_mode=True, explicitly_destroy=True)
        self.x = torch.empty(4, HIDDEN).bfloat16()
        self.y = torch.empty(EXPERTS // 2, 2 * 8, HIDDEN, dtype=torch.bfloat16)
        self.routing = torch.zeros(4, K, dtype=torch.int64), torch.zeros(4, K)

    def dispatch(self, **options: Any) -> tuple[Any, Any]:
        """The handle, and the hook or None."""
        _, _, handle, _, hook = self.buffer.low_latency_dispatch(self.x, self.routing[0], 8, EXPERTS, **options)
        return handle, hook

    def combine(self, handle: Any, **options: Any) -> Any:
        return self.buffer.low_latency_combine(self.y, *self.routing, handle, **options)[2]


def test_nothing_of_a_destroyed_buffer_is_touched_again(gpu):
    pairs = Pairs()
    handle, _ = pairs.dispatch()
    _, receive = pairs.dispatch(return_recv_hook=True)
    combine_hook = pairs.combine(handle, return_recv_hook=True)
    pairs.buffer.destroy()
    gpu.clear()
    for call in (pairs.dispatch, lambda: pairs.combine(handle), receive, combine_hook):
        with pytest.raises(RuntimeError, match=r"\[rank 0/2\].* this Buffer is destroyed"):
            call()
    assert gpu.launched == []


def test_low_latency_rows_that_begin_between_multiples_of_16_bytes_are_named(gpu):
    pairs = Pairs()
    handle, _ = pairs.dispatch()
    gpu.clear()
    out, aligned = off_by_two_bytes(4, HIDDEN), pairs.y
    for name, call in (("out", lambda: pairs.combine(handle, out=out)), ("x", lambda: pairs.combine(handle))):
        pairs.y = aligned if name == "out" else off_by_two_bytes(*aligned.shape)
        with pytest.raises(ValueError, match=rf"\[rank 0/2\] low_latency_combine: {name} begins at .*multiple of 16"):
            call()
    pairs.x = off_by_two_bytes(4, HIDDEN)
    with pytest.raises(ValueError, match=r"\[rank 0/2\] low_latency_dispatch: x begins at .*multiple of 16"):
        pairs.dispatch()
    assert gpu.launched == []
    pairs.x, pairs.y = torch.empty(4, HIDDEN).bfloat16(), aligned
    pairs.combine(pairs.dispatch()[0])
    assert gpu.names == ["dispatch", "combine"]


def test_all_that_an_asynchronous_layout_makes_is_kept_for_the_callers_stream(gpu, monkeypatch):
    used: list[tuple[int, Any]] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: used.append((id(tensor), stream)))
    buffer, idx = Buffer(Group(0, 2), 1 << 22), torch.zeros(T, K, dtype=torch.int64)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS, async_finish=True)
    streams = buffer._normal()._streams
    assert (id(idx), streams.stream) in used
    assert {(id(made), streams.caller) for made in (per_rank, per_expert, in_rank)} <= set(used)


@pytest.mark.parametrize("mode", MODES)
def test_calls_name_rows_that_begin_between_multiples_of_16_bytes(gpu, mode):
    backend = make(mode)
    routing = torch.zeros(T, K, dtype=torch.int64), torch.zeros(T, K)
    with pytest.raises(ValueError, match=r"\[rank 0/2\] dispatch_send: x_TH begins at .*multiple of 16"):
        backend.dispatch(off_by_two_bytes(T, HIDDEN), *routing)
    handle, _ = backend.dispatch(torch.empty(T, HIDDEN).bfloat16(), *routing)
    gpu.clear()
    with pytest.raises(ValueError, match=r"\[rank 0/2\] combine_send: y_RH begins at .*multiple of 16"):
        backend.combine(off_by_two_bytes(backend.max_rows, HIDDEN), handle)
    assert gpu.launched == []


@pytest.mark.parametrize("mode", MODES)
def test_calls_name_a_tensor_of_another_gpu_before_any_launch(gpu, mode):
    backend = make(mode, {})
    x, idx, weights = torch.empty(T, HIDDEN).bfloat16(), torch.zeros(T, K, dtype=torch.int64), torch.zeros(T, K)
    for name, tensor in (("x_TH", x), ("slot_idx_TK", idx), ("topk_weights_TK", weights)):
        gpu.other_gpus = {tensor.data_ptr()}
        with pytest.raises(
            ValueError, match=rf"\[rank 0/2\] dispatch_send: {name} is on .* tensors of this rank's GPU"
        ):
            backend.dispatch_send(x, idx, weights)
    assert gpu.launched == []


def test_deep_eps_interface_names_a_tensor_of_another_gpu_before_any_launch(gpu):
    pairs, rows = Pairs(), Rows(gpu)
    handle, _ = pairs.dispatch()  # looks the same the next time
    pairs.combine(handle)
    gpu.clear()
    gpu.other_gpus = {pairs.routing[0].data_ptr()}
    for call, what in ((pairs.dispatch, "dispatch"), (lambda: pairs.combine(handle), "combine")):
        with pytest.raises(ValueError, match=rf"low_latency_{what}: topk_idx is on .* tensor of this rank's GPU"):
            call()
    for tensor, name in ((rows.x, "x is"), (rows.scale, "scales are"), (rows.idx, "topk_idx:")):
        gpu.other_gpus = {tensor.data_ptr()}
        with pytest.raises(ValueError, match=rf"{name} .* on this rank's GPU"):
            rows.dispatch()
    assert gpu.launched == []


@pytest.mark.parametrize("mode, most", [("low_latency", 128), ("normal", 132)])
def test_more_thread_blocks_than_the_gpu_can_run_at_once_are_refused(gpu, monkeypatch, mode, most):
    make(mode, {"num_sms": most})
    with pytest.raises(ValueError, match=rf"\[rank 0/2\] num_sms = {most + 1}: .* at most {most}; this GPU has"):
        make(mode, {"num_sms": most + 1})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(multi_processor_count=16))
    with pytest.raises(ValueError, match=r"\[rank 0/2\] num_sms = 17: .* at most 16; this GPU has"):
        make(mode, {"num_sms": 17})


def test_the_deadline_is_ten_seconds_unless_told_otherwise(gpu, monkeypatch):
    def deadlines() -> set[float]:
        """Of both modes, by the verbs and by DeepEP's interface."""
        gpu.clear()
        x, idx = torch.empty(T, HIDDEN).bfloat16(), torch.zeros(T, K, dtype=torch.int64)
        for mode in MODES:
            make(mode).dispatch(x, idx, torch.zeros(T, K))
        pairs = Pairs()
        pairs.dispatch()
        exchange = pairs.buffer._normal()._exchange.kernels
        made = [params for _, params, _ in gpu.launched] + [exchange._dispatch.params]
        return {params.context.deadline.timeout_ns / 1e9 for params in made}

    assert deadlines() == {10.0}
    monkeypatch.setenv("EPRT_GPU_TIMEOUT_S", "2.5")
    assert deadlines() == {2.5}
    assert make("normal", timeout_s=7.0).config.timeout_s == 7.0
    monkeypatch.setenv("EPRT_GPU_TIMEOUT", "60")
    with pytest.raises(
        ValueError, match=r"unknown environment variable EPRT_GPU_TIMEOUT; eprt reads .*EPRT_GPU_TIMEOUT_S"
    ):
        Pairs()


@pytest.mark.parametrize("mode", MODES)
def test_a_deadline_beyond_64_bits_of_ns_is_the_longest_there_is(gpu, mode):
    for timeout_s in (1e12, float("inf")):
        backend = make(mode, timeout_s=timeout_s)
        gpu.clear()
        backend.dispatch(torch.empty(T, HIDDEN).bfloat16(), torch.zeros(T, K, dtype=torch.int64), torch.zeros(T, K))
        assert {params.context.deadline.timeout_ns for _, params, _ in gpu.launched} == {2**63}


def test_signals_that_the_kernel_would_misread_are_named_before_any_launch(gpu):
    backend = make("low_latency")
    tiles = -(-2 * T // 16)
    good = Signal(torch.zeros(EXPERTS // 2 * tiles, dtype=torch.int32), 5, 16, tiles)
    handle, received = backend.dispatch(
        torch.empty(T, HIDDEN).bfloat16(), torch.zeros(T, K, dtype=torch.int64), torch.zeros(T, K)
    )
    y = backend.combine_buffer(handle, received)
    gpu.clear()
    for changed, words in (
        ({"counter": good.counter.long()}, "counter is torch.int64"),
        ({"counter": good.counter.repeat(2)[::2]}, r"counter is torch.int32, strides \(2,\)"),
        ({"threshold": 0}, "threshold=0: must be in 1"),
        ({"threshold": 2**32}, "threshold=4294967296: must be in 1"),
        ({"num_sms": 65}, "num_sms=65"),
    ):
        with pytest.raises(ValueError, match=rf"\[rank 0/2\] combine_send: signal.{words}"):
            backend.combine_send(y, handle, replace(good, **changed))
    assert gpu.launched == []
    backend.combine_send(y, handle, good)
    assert gpu.names == ["combine"]


def test_a_rank_that_is_masked_or_taken_back_is_so_in_both_modes_of_deep_ep(gpu):
    pairs = Pairs()
    pairs.dispatch()
    (_, low_latency, _), status = gpu.launched[0], torch.zeros(2, dtype=torch.int32)
    exchange = pairs.buffer._normal()._exchange
    assert exchange.kernels._count.params.context.deadline.mask == low_latency.context.deadline.mask
    exchange.kernels.mask[1] = 1  # as a kernel does at its deadline
    pairs.buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0, 1]
    pairs.buffer.low_latency_clean_mask_buffer()
    assert exchange.kernels.mask.tolist() == [0, 0]


def test_a_rank_that_waited_for_itself_is_not_left_out_from_then_on(gpu):
    rows = Rows(gpu)
    rows.exchange.kernels.mask[:] = 1
    rows.exchange.kernels.failure.words[:] = (2, 1, 3, 4)
    with pytest.raises(EPTimeoutError, match=r"rank 1 in dispatch \(tokens\).*EPRT_GPU_TIMEOUT_S in GPU kernels"):
        rows.dispatch()
    assert rows.exchange.kernels.mask.tolist() == [1, 0]


def test_the_host_tells_counts_only_where_they_are_not_rounded_up(gpu):
    for alignment, told in ((1, [3, 0, 5, 0]), (16, None)):
        backend: Any = make("normal", {"expert_alignment": alignment})
        hosts = [flight.host for flight in backend._flights]

        def count(name: str, params: Any, hosts: list[Any] = hosts) -> None:
            if name == "count":
                host = next(host for host in hosts if host.device_ptr == params.host)
                host.words[4:8] = [-(-rows // params.alignment) * params.alignment for rows in (3, 0, 5, 0)]
                host.words[0] = params.host_ticket

        gpu.on_launch = count
        x, idx = torch.empty(T, HIDDEN).bfloat16(), torch.zeros(T, K, dtype=torch.int64)
        _, received = backend.dispatch(x, idx, torch.zeros(T, K))
        assert received.counts == told


def test_the_buffer_for_the_next_combine_is_kept_from_a_call_that_fails_and_until_another_stream_has_read_it(
    gpu, monkeypatch
):
    used: list[tuple[int, Any]] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: used.append((id(tensor), stream)))
    pairs = Pairs()
    *handles, other = (pairs.dispatch()[0] for _ in range(3))
    hooks = [pairs.combine(handle, return_recv_hook=True) for handle in handles]
    filled = pairs.buffer.get_next_low_latency_combine_buffer(other)
    with pytest.raises(RuntimeError, match="hook of low_latency_combine number 1 has not been called"):
        pairs.combine(other, zero_copy=True)
    for hook in hooks:
        hook()
    gpu.clear()
    pairs.combine(other, zero_copy=True, async_finish=True)
    ((_, params, _),) = gpu.launched
    assert params.y == filled.data_ptr()
    assert (id(filled), pairs.buffer.get_comm_stream()) in used, "the caller need not hold it"


def test_what_a_hook_will_write_to_lives_as_long_as_the_hook(gpu):
    pairs = Pairs()
    stats = torch.zeros(EXPERTS // 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    names = "cumulative_local_expert_recv_stats", "dispatch_wait_recv_cost_stats"
    _, hook = pairs.dispatch(return_recv_hook=True, **dict(zip(names, stats)))
    alive = [weakref.ref(tensor) for tensor in stats]
    del stats
    gc.collect()
    assert all(tensor() is not None for tensor in alive)
    hook()
    del hook
    gc.collect()
    assert all(tensor() is None for tensor in alive)


def test_a_low_latency_call_that_finds_no_memory_leaves_no_hook_to_wait_for(gpu, monkeypatch):
    pairs = Pairs()
    pairs.dispatch(return_recv_hook=True)[1]()

    def no_memory(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")

    for _ in range(3):
        with monkeypatch.context() as full, pytest.raises(torch.OutOfMemoryError):
            full.setattr(torch, "empty_like", no_memory)
            pairs.dispatch(return_recv_hook=True)
        handle, hook = pairs.dispatch(return_recv_hook=True)
        hook()
        pairs.combine(handle)


def test_no_dispatch_takes_the_place_of_one_whose_combine_is_under_way(gpu):
    pairs = Pairs()
    hook = pairs.combine(pairs.dispatch()[0], return_recv_hook=True)
    for _ in range(7):
        pairs.dispatch()
    gpu.clear()
    with pytest.raises(RuntimeError, match=r"\[rank 0/2\] low_latency_dispatch: .* number 9, in the place of number 1"):
        pairs.dispatch()
    assert gpu.launched == []
    hook()
    pairs.combine(pairs.dispatch()[0])


def test_a_low_latency_handle_is_refused_by_another_buffer_and_so_are_its_parts(gpu):
    one, other = Pairs(), Pairs()
    handle, _ = one.dispatch()
    gpu.clear()
    for buffer, bad in ((other, handle), (one, tuple(handle))):
        with pytest.raises(ValueError, match="handle must be the object that low_latency_dispatch of this Buffer"):
            buffer.combine(bad)
    assert gpu.launched == []
    one.combine(handle)


def test_a_normal_handle_is_refused_by_another_buffer_whose_memory_may_be_smaller(gpu):
    rows, buffers = Rows(gpu), [Buffer(Group(0, 2)), Buffer(Group(0, 2))]
    in_rank, per_rank, per_expert = (torch.zeros(*shape, dtype=torch.int32) for shape in ((T, 2), (2,), (EXPERTS,)))

    def dispatch(buffer: Buffer) -> Any:
        rows.exchange = buffer._normal()._exchange  # the one whose counts are told
        x = torch.empty(T, HIDDEN).bfloat16()
        return buffer.dispatch(x, None, per_rank, None, in_rank.bool(), per_expert, rows.idx, rows.weights)

    (received, *_, handle, _), (*_, own, _) = (dispatch(buffer) for buffer in buffers)
    gpu.clear()
    for call in (lambda: buffers[1].combine(received, handle), lambda: buffers[1].dispatch(received, handle=handle)):
        with pytest.raises(ValueError, match=r"\[rank 0/2\] (combine|dispatch): handle must be .*of this Buffer"):
            call()
    assert gpu.launched == []
    buffers[1].combine(received, own)
