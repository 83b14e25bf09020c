"""What the host does in a call on GPUs: as many launches and allocations as stated, and no more. Nothing is timed."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eprt.compat.deep_ep import Buffer
from eprt.compat.deep_ep.rows import RowExchange
from eprt.ep.errors import EPTimeoutError
from tests.fake_gpu import FakeGpu, Group, Ops
from tests.unit.ep.nvlink.cases import EXPERTS, HIDDEN, MODES, K, T, make


def ops_of(gpu: FakeGpu, call: Callable[[], Any]) -> Ops:
    """Of the third call: the first ones remember shapes."""
    for _ in range(2):
        call()
    gpu.clear()
    with Ops() as ops:
        call()
    return ops


class Rows:
    """A RowExchange of rank 1 of 2, where every count finds `coming` rows; and one batch."""

    def __init__(self, gpu: FakeGpu, num_bytes: int = 1 << 22):
        self.gpu, self.coming = gpu, 100
        self.exchange = RowExchange(Group(1, 2), num_bytes, timeout_s=1.0)
        self.x, self.scale = torch.empty(T, HIDDEN, dtype=torch.float8_e4m3fn), torch.empty(T, HIDDEN // 128)
        self.idx, self.weights = torch.zeros(T, K, dtype=torch.int64), torch.zeros(T, K)
        self.on_count: Callable[[], None] = lambda: None
        gpu.on_launch = self._count

    def _count(self, name: str, params: Any) -> None:
        if name == "count":
            words = self.exchange._host.words
            words[1] = words[2] = self.coming
            words[0] = params.host_ticket
            self.on_count()

    def dispatch(self, **options: Any) -> Any:
        return self.exchange.dispatch(
            self.x,
            num_experts=EXPERTS,
            scale_TG=self.scale,
            topk_idx_TK=self.idx,
            topk_weights_TK=self.weights,
            **options,
        )

    def launches(self) -> list[tuple[str, int, int]]:
        """Names, capacities and whether tentative, since the last time."""
        made = [(name, getattr(p, "capacity", 0), getattr(p, "tentative", 0)) for name, p, _ in self.gpu.launched]
        self.gpu.clear()
        return made

    @property
    def used(self) -> int:
        gc.collect()
        pool = self.exchange._pool
        pool._collect_returned()
        return sum(end - start for start, end in pool._used.items())


def test_a_dispatch_launches_before_it_knows_how_much_comes_and_allocates_once(gpu):
    rows = Rows(gpu)
    ops = ops_of(gpu, rows.dispatch)
    assert rows.launches() == [("count", 0, 0), ("dispatch", 2 * T, 1)]
    # What the count leaves; all else lies in symmetric memory: five tensors of it, cut to length when the counts are
    # there (scales are padded), and two of the layout.
    assert ops.allocations == 1
    assert ops.names == {"empty_like": 6, "as_strided": 2, "set_": 5, "resize_": 4, "as_strided_": 1}


def test_what_came_lies_where_the_kernel_was_told_and_only_that_is_kept(gpu):
    rows = Rows(gpu)
    received = rows.dispatch()
    (_, _, _), (_, params, _) = gpu.launched
    block = rows.exchange.kernels.memory.peer_ptr[1] + params.block
    at = rows.exchange._plans._plans.popitem()[1].block_of(2 * T).offsets()
    for tensor, name, shape in (
        (received.x_NH, "x", (100, HIDDEN)),
        (received.scale_NG, "scale", (100, 2)),
        (received.topk_idx_NK, "entry", (100, K)),
        (received.topk_weights_NK, "weight", (100, K)),
        (received.handle.source_token_N, "token", (100,)),
    ):
        assert tensor.data_ptr() == block + at[name] and tuple(tensor.shape) == shape, name
    assert received.scale_NG.stride() == (4, 1) and received.x_NH.dtype == torch.float8_e4m3fn
    assert rows.used == at["x"] + 100 * HIDDEN
    part = received.x_NH[3:5]
    del received, tensor
    assert rows.used == at["x"] + 100 * HIDDEN  # a view keeps all of it
    del part
    assert rows.used == 0


def test_more_rows_than_guessed_are_dispatched_again_and_guessed_from_then_on(gpu):
    rows = Rows(gpu)
    rows.coming = 1000
    received = rows.dispatch()
    assert rows.launches() == [("count", 0, 0), ("dispatch", 2 * T, 1), ("dispatch", 1000, 0)]
    assert received.x_NH.shape[0] == received.handle.num_rows == 1000
    assert rows.dispatch().x_NH.shape[0] == 1000
    assert rows.launches() == [("count", 0, 0), ("dispatch", 1024, 1)]


def test_without_room_for_a_guess_the_counts_are_waited_for_first(gpu):
    rows = Rows(gpu, num_bytes=40 << 10)
    rows.coming = 10
    received = rows.dispatch()
    assert rows.launches() == [("count", 0, 0), ("dispatch", 10, 0)]
    assert received.x_NH.shape == (10, HIDDEN)
    rows.coming = 1000
    with pytest.raises(ValueError, match=r"\[rank 1/2\] no room for 1000 received rows .*num_bytes larger"):
        rows.dispatch()
    assert rows.launches() == [("count", 0, 0), ("dispatch", 0, 0)], "peers are told that there is no room"


def test_a_static_bound_is_launched_as_it_is(gpu):
    rows = Rows(gpu)
    assert rows.dispatch(num_worst_rows=300).x_NH.shape[0] == 300
    assert rows.launches() == [("count", 0, 0), ("dispatch", 300, 0)]


def test_what_a_count_reports_is_raised_after_the_launch_that_peers_wait_for(gpu):
    rows = Rows(gpu)
    for coming, launches in ((100, 2), (1000, 3)):
        rows.coming = coming

        def fail() -> None:
            rows.exchange.kernels.failure.words[:] = (1, 0, 3, 4)

        rows.on_count = fail
        with pytest.raises(EPTimeoutError, match=r"\[rank 1/2\] waited 1.0 s for rank 0 in dispatch \(counts\)"):
            rows.dispatch()
        assert len(rows.launches()) == launches
        rows.exchange._recent_rows = 0


def test_arguments_that_look_as_before_are_not_checked_again_and_others_are(gpu, monkeypatch):
    rows, checked = Rows(gpu), []
    check = rows.exchange._plans.check_payload
    monkeypatch.setattr(rows.exchange._plans, "check_payload", lambda payload: (checked.append(1), check(payload)))
    rows.dispatch()
    rows.dispatch()
    assert checked == [1]
    good = dict(vars(rows))
    wrong: list[tuple[str, Any, str]] = [
        ("x", rows.x[:, ::2], "contiguous"),
        ("x", torch.empty(T, 24, dtype=torch.float8_e4m3fn), "24 B"),
        ("x", torch.empty(T * HIDDEN + 8, dtype=torch.uint8)[8:].view(T, HIDDEN), "at multiples of 16"),
        ("scale", torch.empty(T - 1, 2), "scales are"),
        ("idx", rows.idx.short(), "topk_idx: torch.int16"),
        ("weights", rows.weights[:-1], "topk_weights"),
        ("weights", rows.weights.double(), "torch.float64"),
    ]
    for name, value, words in wrong:
        setattr(rows, name, value)
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"\[rank 1/2\].*{words}"):
                rows.dispatch()
        setattr(rows, name, good[name])
    with pytest.raises(ValueError, match="expert_alignment=0"):
        rows.dispatch(expert_alignment=0)
    with pytest.raises(ValueError, match="rows are more than num_bytes allows for"):
        rows.dispatch(num_worst_rows=1 << 20)


def test_deep_eps_dispatch_launches_three_kernels_and_its_combine_one(gpu):
    buffer = Buffer(Group(0, 2), 1 << 22)
    x, idx, weights = torch.empty(T, HIDDEN).bfloat16(), torch.zeros(T, K, dtype=torch.int64), torch.zeros(T, K)
    kept: list[Any] = []

    def count(name: str, params: Any) -> None:
        if name == "count":
            words = buffer._normal()._exchange._host.words
            words[1] = words[2] = 90
            words[0] = params.host_ticket

    def whole() -> None:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
        kept[:] = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, idx, weights)

    gpu.on_launch = count
    ops = ops_of(gpu, whole)
    assert gpu.names == ["layout", "count", "dispatch"]
    # The layout's three results, and what the count leaves.
    assert ops.allocations == 4 and ops.names == {"empty_like": 8, "as_strided": 2, "set_": 4, "resize_": 4}
    received, handle = kept[0], kept[4]
    assert ops_of(gpu, lambda: buffer.dispatch(x, handle=handle)).allocations == 0
    assert gpu.names == ["dispatch"]
    assert ops_of(gpu, lambda: buffer.combine(received, handle)).allocations == 1
    assert gpu.names == ["combine"]


def test_deep_eps_low_latency_pair_launches_two_kernels_and_allocates_what_it_returns(gpu):
    buffer = Buffer(Group(0, 2), low_latency_mode=True)
    x, idx, weights = torch.empty(4, HIDDEN).bfloat16(), torch.zeros(4, K, dtype=torch.int64), torch.zeros(4, K)
    stats = torch.zeros(EXPERTS // 2, dtype=torch.int32)
    y = torch.empty(EXPERTS // 2, 2 * 8, HIDDEN, dtype=torch.bfloat16)

    def pair() -> None:
        _, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, 8, EXPERTS, cumulative_local_expert_recv_stats=stats)
        buffer.low_latency_combine(y, idx, weights, handle)

    ops = ops_of(gpu, pair)
    assert gpu.names == ["dispatch", "combine"]
    assert ops.names == {"empty_like": 4}  # rows, their scales, counts; what combine returns


def test_a_launch_of_both_phases_takes_twice_the_thread_blocks_of_one_unless_told_how_many(gpu):
    x, idx, weights = torch.empty(T, HIDDEN).bfloat16(), torch.zeros(T, K, dtype=torch.int64), torch.zeros(T, K)
    for options, both, one in ((None, 128, 64), ({"num_sms": 20}, 20, 20)):
        backend = make("low_latency", options or {})
        y = torch.empty(backend.max_rows, HIDDEN, dtype=torch.bfloat16)
        gpu.clear()
        handle, _ = backend.dispatch(x, idx, weights)
        backend.combine(y, handle)
        handle = backend.dispatch_send(x, idx, weights)
        backend.dispatch_recv(handle)
        backend.combine_send(y, handle)
        backend.combine_recv(handle)
        assert [blocks for _, _, blocks in gpu.launched] == [both] * 2 + [one] * 4


@pytest.mark.parametrize("mode", MODES)
def test_calls_launch_as_many_kernels_as_they_must_and_allocate_the_result(gpu, mode):
    backend = make(mode, payload="fp8")
    x, idx, weights = torch.empty(T, HIDDEN).bfloat16(), torch.zeros(T, K, dtype=torch.int64), torch.zeros(T, K)
    y = torch.empty(backend.max_rows, HIDDEN, dtype=torch.bfloat16)

    def pair() -> None:
        handle, _ = backend.dispatch(x, idx, weights)
        backend.combine(y, handle)

    ops = ops_of(gpu, pair)
    assert gpu.names == ["count"] * (mode == "normal") + ["dispatch", "combine"]
    assert ops.allocations == 1
