"""LowLatencyMode: DeepEP's low-latency dispatch and combine of one shape, over eprt's low-latency kernels.

What DeepEP promises and these keep: an expert's rows lie in a block of R * M rows; a dispatch may be combined any
number of times, or never; the receiving half may be left to a hook, and then the sending half waits for nobody. Only
combine is told the weights. So it sends them first, and the experts' ranks sum their outputs with them before the wire;
but with a hook every output crosses by itself. Weights that dispatch is given make for sums in both cases.

R ranks, M tokens of a rank at most, H hidden, K top-k, L experts of a rank.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eprt.compat.deep_ep.checks import MAX_SMS
from eprt.compat.deep_ep.event import EventHandle
from eprt.compat.deep_ep.plain import plain
from eprt.compat.deep_ep.streams import CommStream
from eprt.ep.errors import EPTimeoutError
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.failure import CallContext, take_failure
from eprt.ep.nvlink.low_latency import EXPONENTS, FLOAT, POWER_OF_TWO, LowLatency, Rows, Signal
from eprt.ep.nvlink.low_latency_layout import LowLatencyHeap
from eprt.ep.nvlink.structs import RECV, SEND
from eprt.gpu.device import multiprocessors
from eprt.gpu.shapes import shape_only

# Of each kind of call, how many may have sent and not received: buffers are reused after twice as many.
NUM_IN_FLIGHT = 2
# Dispatches that may still be combined.
NUM_HANDLES = 8
_SCALE_GROUP = 128

_log = logging.getLogger("eprt.compat.deep_ep")


@dataclass(frozen=True)
class Shape:
    """What DeepEP's calls name, equal on all ranks. exact: outputs cross one by one, unsummed."""

    max_tokens: int
    hidden: int
    num_experts: int
    top_k: int
    exact: bool = False

    def heap(self, num_ranks: int) -> LowLatencyHeap:
        return LowLatencyHeap(
            num_ranks, self.max_tokens, self.hidden, self.top_k, self.num_experts // num_ranks, "either", self.exact,
            NUM_IN_FLIGHT, late_weights=not self.exact,
        )  # fmt: skip


class LowLatencyHandle(tuple):
    """DeepEP's handle: (src_info int32 [L, R * M], layout_range int64 [L, R], M, H, experts). And whose it is, of how
    many tokens of this rank, and the rows of each local expert. The tensors hold as long as the handle: they are those
    of another dispatch once NUM_HANDLES have come after it."""

    mode: "LowLatencyMode"
    number: int
    num_tokens: int
    rows_of_expert: Tensor


@dataclass(frozen=True, eq=False)  # found by identity
class Kind:
    """How received rows come: as fp8 or bf16, and with which scales (ScaleFormat)."""

    fp8: bool
    scale_format: int


BF16 = Kind(False, FLOAT)
FP8 = {scale_format: Kind(True, scale_format) for scale_format in (FLOAT, POWER_OF_TWO, EXPONENTS)}


def received_like(kind: Kind, num_local: int, per_expert: int, hidden: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Shapes of what a dispatch returns: rows, scales (None for bf16), with DeepEP's column-major rows, and counts."""
    x = shape_only(num_local, per_expert, hidden, dtype=torch.float8_e4m3fn if kind.fp8 else torch.bfloat16)
    scale, count = None, shape_only(num_local, dtype=torch.int32)
    if kind.fp8:
        packed, groups = kind.scale_format == EXPONENTS, -(-hidden // _SCALE_GROUP)
        dtype = torch.int32 if packed else torch.float32
        groups = groups // 4 if packed else groups
        scale = shape_only(num_local, per_expert, groups, dtype=dtype, columns_first=True)
    return x, scale, count


class Pending:
    """Calls whose hook has not run, by number."""

    def __init__(self, what: str):
        self._what, self.count = what, 0
        self._numbers: deque[int] = deque()

    def begin(self, has_hook: bool) -> int:
        """The next call's number. Raises RuntimeError when too many hooks are outstanding."""
        if self._numbers and self.count - self._numbers[0] >= NUM_IN_FLIGHT - 1:
            raise RuntimeError(
                f"{self._what}: {NUM_IN_FLIGHT} calls may be under way, but the hook of {self._what} number "
                f"{self._numbers[0]} has not been called and this would be number {self.count + 1}"
            )
        self.count += 1
        if has_hook:
            self._numbers.append(self.count)
        return self.count

    def end(self, number: int) -> None:
        if number not in self._numbers:
            raise RuntimeError(f"{self._what}: the hook of number {number} has been called already")
        self._numbers.remove(number)

    def waits(self, number: int) -> bool:
        return number in self._numbers


class LowLatencyMode:
    """Construction and close() are collective. stream: for calls with async_finish. mask: int32 [R] on the GPU.

    shrink: a rank that is late is masked and the others go on; without, the next call raises EPTimeoutError, too.
    """

    def __init__(
        self, group: EPGroup, shape: Shape, *, stream: torch.cuda.Stream, mask: Tensor, shrink: bool, timeout_s: float
    ):
        self.group, self.shape, self._shrink = group, shape, shrink
        self.num_local, self.rows_per_expert = shape.num_experts // group.size, group.size * shape.max_tokens
        self.block = self.num_local, self.rows_per_expert, shape.hidden  # of rows, by expert
        num_sms = min(MAX_SMS, multiprocessors())
        self.kernels = LowLatency(
            group, shape.heap(group.size), self.num_local * self.rows_per_expert, num_handles=NUM_HANDLES,
            num_sms=num_sms, timeout_s=timeout_s, mask=mask,
        )  # fmt: skip
        self._asked = CallContext(group, timeout_s, shape.top_k, shape.num_experts, "low_latency_dispatch", "topk_idx")
        self._failure_words: Any = self.kernels.failure.words
        self._closed = False
        self._where = f"[rank {group.rank}/{group.size}] low_latency_combine:"
        self._streams = CommStream(stream)
        self._dispatches, self._combines = Pending("low_latency_dispatch"), Pending("low_latency_combine")
        self._combining: dict[int, int] = {}  # handle -> its combine whose hook has not run
        self._next_y: Tensor | None = None
        self._like: dict[Kind, tuple[Tensor, Tensor | None, Tensor]] = {}  # shapes of what a dispatch returns
        self._outs: dict[int, Tensor] = {}  # shapes of combine's results, by number of tokens
        self._bound: list[Kind | None] = [None] * NUM_HANDLES
        # src_info and layout_range of each handle: of its last dispatch, as the kernels' own books are.
        per_expert = self.rows_per_expert
        self._tokens = torch.zeros(NUM_HANDLES, self.num_local, per_expert, dtype=torch.int32, device="cuda").unbind()
        self._ranges = torch.zeros(NUM_HANDLES, self.num_local, group.size, dtype=torch.int64, device="cuda").unbind()

    # -- dispatch --

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, recv_stats: Tensor | None,
        wait_stats: Tensor | None, kind: Kind, *, async_finish: bool, return_recv_hook: bool,
    ) -> tuple[Tensor, Tensor | None, LowLatencyHandle, EventHandle | None, Callable[[], None] | None]:  # fmt: skip
        """Received rows as DeepEP lays them out, and their scales; count is the handle's rows_of_expert. Arguments are
        checked by Buffer. topk_weights: when known already."""
        if self._failure_words[0]:
            self._raise_failure()
        next_number = self._dispatches.count + 1
        if next_number - NUM_HANDLES in self._combining:  # its hook would receive another combine's outputs
            raise RuntimeError(
                f"[rank {self.group.rank}/{self.group.size}] low_latency_dispatch: this would be number {next_number}, "
                f"in the place of number {next_number - NUM_HANDLES}, of which a combine is under way; call its hook "
                "first"
            )
        i = next_number % NUM_HANDLES
        rows, scale, count = self._receive_into(i, kind)  # there may be no memory: then the call has not begun
        number = self._dispatches.begin(return_recv_hook)
        self.kernels.count_for_caller(i, recv_stats, wait_stats)
        phases = SEND if return_recv_hook else SEND | RECV
        if not async_finish and self._streams.stays():
            self.kernels.dispatch(i, x, topk_idx, topk_weights, phases)
        else:
            with self._streams.run(async_finish):
                self.kernels.dispatch(i, x, topk_idx, topk_weights, phases)
        shape = self.shape
        handle = LowLatencyHandle((self._tokens[i], self._ranges[i], shape.max_tokens, shape.hidden, shape.num_experts))
        handle.mode, handle.number, handle.num_tokens, handle.rows_of_expert = self, number, x.shape[0], count
        if not return_recv_hook:
            return rows, scale, handle, self._streams.event(async_finish), None
        stream = torch.cuda.current_stream()

        @plain
        def receive(_alive: object = (rows, scale, count, recv_stats, wait_stats)) -> None:
            self._check_open()
            self._dispatches.end(number)
            with self._streams.resume(stream):
                self.kernels.dispatch(i, x, topk_idx, topk_weights, RECV)

        return rows, scale, handle, None, receive

    def _receive_into(self, i: int, kind: Kind) -> tuple[Tensor, Tensor | None, Tensor]:
        """New tensors for the next dispatch of handle i: rows, scales, count."""
        per_expert = self.rows_per_expert
        like = self._like.get(kind)
        if like is None:
            like = self._like[kind] = received_like(kind, self.num_local, per_expert, self.shape.hidden)
        x, scale, count = like
        x, count = torch.empty_like(x), torch.empty_like(count)
        if scale is not None:
            scale = torch.empty_like(scale)
        if self._bound[i] is kind:
            self.kernels.bind_again(i, x, scale, count)
            return x, scale, count
        # Rows count over all experts.
        strides = (0, 0, 0) if scale is None else (scale.stride(0) - per_expert, 1, per_expert)
        tokens, ranges = self._tokens[i], self._ranges[i]
        self.kernels.bind(i, Rows(x, scale, count, strides, kind.scale_format, per_expert, 1, tokens, ranges))
        self._bound[i] = kind
        return x, scale, count

    # -- combine --

    def combine(
        self, y: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: LowLatencyHandle, out: Tensor | None,
        wait_stats: Tensor | None, signal: Signal | None = None, *, zero_copy: bool, async_finish: bool,
        return_recv_hook: bool,
    ) -> tuple[Tensor, EventHandle | None, Callable[[], None] | None]:  # fmt: skip
        """Arguments are checked by Buffer. signal: with return_recv_hook, send tile by tile."""
        if self._failure_words[0]:
            self._raise_failure()
        self._check_handle(handle)
        if out is None:
            shape = self._outs.get(handle.num_tokens)
            out = self._new_out(handle.num_tokens) if shape is None else torch.empty_like(shape)
        number = self._combines.begin(return_recv_hook)
        if zero_copy and self._next_y is not None:
            y, self._next_y = self._next_y, None
            if async_finish:  # the caller may have let go of it
                y.record_stream(self._streams.stream)
        i = handle.number % NUM_HANDLES
        if not (async_finish or return_recv_hook) and self._streams.stays():
            self.kernels.combine_recv(i, topk_idx, topk_weights, out, y, wait_stats)
            return out, None, None
        with self._streams.run(async_finish):
            if not return_recv_hook:
                self.kernels.combine_recv(i, topk_idx, topk_weights, out, y, wait_stats)
                return out, self._streams.event(async_finish), None
            self.kernels.combine_send(i, y, handle.rows_of_expert, signal)
        self._combining[handle.number], stream = number, torch.cuda.current_stream()

        @plain
        def receive() -> None:
            self._check_open()
            self._combines.end(number)
            self._combining.pop(handle.number, None)
            with self._streams.resume(stream):
                self.kernels.combine_recv(i, topk_idx, topk_weights, out, None, wait_stats)

        return out, None, receive

    def _new_out(self, num_tokens: int) -> Tensor:
        shape = self._outs[num_tokens] = shape_only(num_tokens, self.shape.hidden, dtype=torch.bfloat16)
        return torch.empty_like(shape)

    def next_combine_buffer(self) -> Tensor:
        """bf16 [L, R * M, H], read by the next combine with zero_copy. combine never copies: any tensor would do."""
        self._next_y = torch.empty(self.block, dtype=torch.bfloat16, device="cuda")
        return self._next_y

    def _check_handle(self, handle: LowLatencyHandle) -> None:
        number = handle.number
        if number <= self._dispatches.count - NUM_HANDLES:
            raise RuntimeError(
                f"{self._where} the handle is of dispatch {number} and there have been {self._dispatches.count}; the "
                f"last {NUM_HANDLES} can be combined"
            )
        if self._dispatches.waits(number):
            raise RuntimeError(f"{self._where} call the hook of the dispatch first: its tokens have not been received")
        if number in self._combining:
            raise RuntimeError(f"{self._where} this handle has a combine under way; call its hook first")

    # -- beside --

    def meet(self) -> None:
        """On the GPU: waits until every rank that is not masked has come here."""
        x = torch.empty(0, self.shape.hidden, dtype=torch.bfloat16, device="cuda")
        topk_idx = torch.empty(0, self.shape.top_k, dtype=torch.int64, device="cuda")
        self.dispatch(x, topk_idx, None, None, None, BF16, async_finish=False, return_recv_hook=False)

    def close(self) -> None:
        self._closed, self._failure_words = True, [1]  # the memory of the kernels' words goes; calls look here first
        self.kernels.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"[rank {self.group.rank}/{self.group.size}] this Buffer is destroyed")

    def _raise_failure(self) -> None:
        self._check_open()
        failure = take_failure(self.kernels.failure.words, self._asked)
        if failure is None:
            return
        self.kernels.mask[self.group.rank].zero_()  # it waited for itself: for a tile that did not come
        if not (self._shrink and isinstance(failure, EPTimeoutError)):
            raise failure
        _log.warning("%s; it is masked from now on", failure)
