"""LowLatencyMode: DeepEP's low-latency dispatch and combine of one shape, over eprt's low-latency kernels.

DeepEP's guarantees hold: an expert's rows lie in a block of R * M rows; a dispatch may be combined any number of times,
or never; the receiving half may be left to a hook, and then the sending half waits for nobody. Only combine is told the
weights, so it sends them first, and the experts' ranks sum their outputs before they send; with a hook, every output is
sent separately. If dispatch is given the weights, outputs are summed in both cases. Knows nothing of other shapes.

R ranks, M tokens of a rank at most, H hidden, K top-k, L experts of a rank.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eprt.compat.deep_ep.event import EventHandle
from eprt.compat.deep_ep.function_modes import without_function_modes
from eprt.compat.deep_ep.setup import BufferSetup
from eprt.compat.deep_ep.streams import CommStream
from eprt.ep.errors import EPTimeoutError
from eprt.ep.nvlink.failure import CallContext, take_failure
from eprt.ep.nvlink.kernel_state import KernelOptions
from eprt.ep.nvlink.low_latency import EXPONENTS, FLOAT, POWER_OF_TWO, LowLatency, Rows, Signal
from eprt.ep.nvlink.low_latency_layout import LowLatencyHeap
from eprt.ep.nvlink.structs import RECV, SEND
from eprt.gpu.shapes import shape_only

# Dispatches, and combines, that may have been sent and not received: buffers are reused after twice as many.
NUM_IN_FLIGHT = 2
# Dispatches that may still be combined.
NUM_HANDLES = 8
_SCALE_GROUP = 128

_log = logging.getLogger("eprt.compat.deep_ep")


@dataclass(frozen=True)
class LowLatencyShape:
    """The sizes that low-latency calls name, equal on all ranks."""

    max_tokens: int  # of a rank: num_max_dispatch_tokens_per_rank
    hidden: int
    num_experts: int  # of all ranks
    top_k: int
    exact: bool = False  # every expert's output is sent separately

    def heap(self, num_ranks: int) -> LowLatencyHeap:
        sizes = num_ranks, self.max_tokens, self.hidden, self.top_k, self.num_experts // num_ranks
        return LowLatencyHeap(*sizes, "either", self.exact, NUM_IN_FLIGHT, late_weights=not self.exact)


class LowLatencyHandle(tuple):
    """DeepEP's handle: (src_info int32 [L, R * M], layout_range int64 [L, R], M, H, experts). The tensors are valid
    until NUM_HANDLES more dispatches have reused their memory."""

    mode: "LowLatencyMode"  # that made it
    number: int  # of the dispatch
    num_tokens: int  # of this rank
    rows_of_expert: Tensor  # int32 [L]


@dataclass(frozen=True, eq=False)  # compared by identity
class RowFormat:
    """The format of received rows."""

    fp8: bool  # otherwise bf16
    scale_format: int  # ScaleFormat


BF16 = RowFormat(False, FLOAT)
FP8 = {scale_format: RowFormat(True, scale_format) for scale_format in (FLOAT, POWER_OF_TWO, EXPONENTS)}


def received_like(
    row_format: RowFormat, num_local: int, per_expert: int, hidden: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Templates of what a dispatch returns: rows, scales (column-major, None for bf16) and counts."""
    x = shape_only(num_local, per_expert, hidden, dtype=torch.float8_e4m3fn if row_format.fp8 else torch.bfloat16)
    scale, count = None, shape_only(num_local, dtype=torch.int32)
    if row_format.fp8:
        packed, groups = row_format.scale_format == EXPONENTS, -(-hidden // _SCALE_GROUP)
        dtype = torch.int32 if packed else torch.float32
        groups = groups // 4 if packed else groups
        scale = shape_only(num_local, per_expert, groups, dtype=dtype, columns_first=True)
    return x, scale, count


class PendingHooks:
    """The calls of one kind whose hook has not run yet."""

    def __init__(self, what: str):
        self._what = what  # the name of the calls, for errors
        self.count = 0  # calls so far
        self._numbers: deque[int] = deque()  # of the calls whose hook has not run

    def begin_call(self, has_hook: bool) -> int:
        """The next call's number. RuntimeError when too many hooks are outstanding."""
        if self._numbers and self.count - self._numbers[0] >= NUM_IN_FLIGHT - 1:
            raise RuntimeError(
                f"{self._what}: {NUM_IN_FLIGHT} calls may be under way, but the hook of {self._what} number "
                f"{self._numbers[0]} has not been called and this would be number {self.count + 1}"
            )
        self.count += 1
        if has_hook:
            self._numbers.append(self.count)
        return self.count

    def end_call(self, number: int) -> None:
        if number not in self._numbers:
            raise RuntimeError(f"{self._what}: the hook of number {number} has been called already")
        self._numbers.remove(number)

    def is_pending(self, number: int) -> bool:
        return number in self._numbers


class LowLatencyMode:
    """The low-latency calls of one shape. Construction and close() are collective."""

    def __init__(self, setup: BufferSetup, shape: LowLatencyShape):
        self.group, self.shape, self._shrink = setup.group, shape, setup.shrink
        group = setup.group
        self.num_local, self.rows_per_expert = shape.num_experts // group.size, group.size * shape.max_tokens
        self.block = self.num_local, self.rows_per_expert, shape.hidden  # shape of received rows
        num_rows, options = self.num_local * self.rows_per_expert, KernelOptions(setup.timeout_s, setup.mask)
        self.kernels = LowLatency(group, shape.heap(group.size), num_rows, NUM_HANDLES, None, options)
        asked = setup.timeout_s, shape.top_k, shape.num_experts
        self._asked = CallContext(group, *asked, "low_latency_dispatch", "topk_idx")
        self._failure_words: Any = self.kernels.failure.words
        self._closed = False
        self._where = f"[rank {group.rank}/{group.size}] low_latency_combine:"
        self._streams = CommStream(setup.stream)
        self._dispatches, self._combines = PendingHooks("low_latency_dispatch"), PendingHooks("low_latency_combine")
        self._combining: dict[int, int] = {}  # dispatch -> its combine whose hook has not run
        self._next_y: Tensor | None = None  # input of the next combine with zero_copy
        self._like: dict[RowFormat, tuple[Tensor, Tensor | None, Tensor]] = {}  # templates of what a dispatch returns
        self._outs: dict[int, Tensor] = {}  # templates of combine's results, by number of tokens
        self._bound: list[RowFormat | None] = [None] * NUM_HANDLES  # format of each handle's last dispatch
        # src_info and layout_range of each handle's last dispatch.
        per_expert = self.rows_per_expert
        self._tokens = torch.zeros(NUM_HANDLES, self.num_local, per_expert, dtype=torch.int32, device="cuda").unbind()
        self._ranges = torch.zeros(NUM_HANDLES, self.num_local, group.size, dtype=torch.int64, device="cuda").unbind()

    # -- dispatch --

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        recv_stats: Tensor | None,
        wait_stats: Tensor | None,
        row_format: RowFormat,
        async_finish: bool,
        return_recv_hook: bool,
    ) -> tuple[Tensor, Tensor | None, LowLatencyHandle, EventHandle | None, Callable[[], None] | None]:
        """(rows, scales, handle, event, hook). Arguments were checked by Buffer. topk_weights: if known already."""
        if self._failure_words[0]:
            self._raise_failure()
        next_number = self._dispatches.count + 1
        if next_number - NUM_HANDLES in self._combining:  # its hook would receive another combine's outputs
            raise RuntimeError(
                f"[rank {self.group.rank}/{self.group.size}] low_latency_dispatch: this would be number {next_number}, "
                f"in the place of number {next_number - NUM_HANDLES}, of which a combine is under way; call its hook "
                "first"
            )
        i, num_tokens = next_number % NUM_HANDLES, x.shape[0]
        rows, scale, count = self._receive_into(i, row_format)  # before the call begins: there may be no memory
        number = self._dispatches.begin_call(return_recv_hook)
        self.kernels.count_for_caller(i, recv_stats, wait_stats)
        phases = SEND if return_recv_hook else SEND | RECV
        if not async_finish and self._streams.stays_on_stream():
            self.kernels.dispatch(i, num_tokens, x, topk_idx, topk_weights, phases)
        else:
            with self._streams.run_call(async_finish):
                self.kernels.dispatch(i, num_tokens, x, topk_idx, topk_weights, phases)
        shape = self.shape
        handle = LowLatencyHandle((self._tokens[i], self._ranges[i], shape.max_tokens, shape.hidden, shape.num_experts))
        handle.mode, handle.number, handle.num_tokens, handle.rows_of_expert = self, number, num_tokens, count
        if not return_recv_hook:
            return rows, scale, handle, self._streams.record_event(async_finish), None
        stream = torch.cuda.current_stream()

        @without_function_modes
        def receive(_alive: object = (rows, scale, count, recv_stats, wait_stats)) -> None:
            self._check_open()
            self._dispatches.end_call(number)
            with self._streams.resume_call(stream):
                self.kernels.dispatch(i, num_tokens, x, topk_idx, topk_weights, RECV)

        return rows, scale, handle, None, receive

    def _receive_into(self, i: int, row_format: RowFormat) -> tuple[Tensor, Tensor | None, Tensor]:
        """New tensors for the next dispatch with handle i: (rows, scales, counts)."""
        per_expert = self.rows_per_expert
        like = self._like.get(row_format)
        if like is None:
            like = self._like[row_format] = received_like(row_format, self.num_local, per_expert, self.shape.hidden)
        new = torch.empty_like
        x, scale, count = new(like[0]), None if like[1] is None else new(like[1]), new(like[2])
        if self._bound[i] is row_format:
            self.kernels.bind_again(i, x, scale, count)
            return x, scale, count
        # Rows count over all experts.
        strides = (0, 0, 0) if scale is None else (scale.stride(0) - per_expert, 1, per_expert)
        tokens, ranges = self._tokens[i], self._ranges[i]
        self.kernels.bind(i, Rows(x, scale, count, strides, row_format.scale_format, per_expert, 1, tokens, ranges))
        self._bound[i] = row_format
        return x, scale, count

    # -- combine --

    def combine(
        self,
        y: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        out: Tensor | None,
        wait_stats: Tensor | None,
        signal: Signal | None,
        zero_copy: bool,
        async_finish: bool,
        return_recv_hook: bool,
    ) -> tuple[Tensor, EventHandle | None, Callable[[], None] | None]:
        """(combined rows, event, hook). Arguments were checked by Buffer. signal: to send tile by tile, with
        return_recv_hook."""
        if self._failure_words[0]:
            self._raise_failure()
        self._check_handle(handle)
        num_tokens = handle.num_tokens
        if out is None:
            shape = self._outs.get(num_tokens)
            if shape is None:
                shape = self._outs[num_tokens] = shape_only(num_tokens, self.shape.hidden, dtype=torch.bfloat16)
            out = torch.empty_like(shape)
        number = self._combines.begin_call(return_recv_hook)
        if zero_copy and self._next_y is not None:
            y, self._next_y = self._next_y, None
            if async_finish:  # the caller may have released it
                y.record_stream(self._streams.stream)
        i = handle.number % NUM_HANDLES
        if not (async_finish or return_recv_hook) and self._streams.stays_on_stream():
            self.kernels.combine_recv(i, num_tokens, topk_idx, topk_weights, out, y, wait_stats)
            return out, None, None
        with self._streams.run_call(async_finish):
            if not return_recv_hook:
                self.kernels.combine_recv(i, num_tokens, topk_idx, topk_weights, out, y, wait_stats)
                return out, self._streams.record_event(async_finish), None
            self.kernels.combine_send(i, y, handle.rows_of_expert, signal)
        self._combining[handle.number], stream = number, torch.cuda.current_stream()

        @without_function_modes
        def receive() -> None:
            self._check_open()
            self._combines.end_call(number)
            self._combining.pop(handle.number, None)
            with self._streams.resume_call(stream):
                self.kernels.combine_recv(i, num_tokens, topk_idx, topk_weights, out, None, wait_stats)

        return out, None, receive

    def next_combine_buffer(self) -> Tensor:
        """bf16 [L, R * M, H], the input of the next combine with zero_copy. combine never copies any input."""
        self._next_y = torch.empty(self.block, dtype=torch.bfloat16, device="cuda")
        return self._next_y

    def _check_handle(self, handle: LowLatencyHandle) -> None:
        number = handle.number
        if number <= self._dispatches.count - NUM_HANDLES:
            raise RuntimeError(
                f"{self._where} the handle is of dispatch {number} and there have been {self._dispatches.count}; the "
                f"last {NUM_HANDLES} can be combined"
            )
        if self._dispatches.is_pending(number):
            raise RuntimeError(f"{self._where} call the hook of the dispatch first: its tokens have not been received")
        if number in self._combining:
            raise RuntimeError(f"{self._where} this handle has a combine under way; call its hook first")

    # -- beside --

    def gpu_barrier(self) -> None:
        """Waits on the GPU until every rank that is not masked has made this call."""
        x = torch.empty(0, self.shape.hidden, dtype=torch.bfloat16, device="cuda")
        topk_idx = torch.empty(0, self.shape.top_k, dtype=torch.int64, device="cuda")
        self.dispatch(x, topk_idx, None, None, None, BF16, async_finish=False, return_recv_hook=False)

    def close(self) -> None:
        self._closed, self._failure_words = True, [1]  # the kernels' words are freed; calls then fail in _check_open
        self.kernels.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"[rank {self.group.rank}/{self.group.size}] this Buffer is destroyed")

    def _raise_failure(self) -> None:
        self._check_open()
        failure = take_failure(self.kernels.failure.words, self._asked)
        if failure is None:
            return
        self.kernels.mask[self.group.rank].zero_()  # a missing tile makes a rank mask itself
        if not (self._shrink and isinstance(failure, EPTimeoutError)):
            raise failure
        _log.warning("%s; it is masked from now on", failure)
