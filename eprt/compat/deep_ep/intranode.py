"""IntranodeMode: DeepEP's normal dispatch and combine over a RowExchange.

Knows which stream a call runs on and which tensors other streams use; nothing of how rows travel.

T tokens of this rank, N tokens received, H hidden, K top-k, R ranks, E experts of all ranks.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from eprt.compat.deep_ep.dispatch_layout import DispatchLayout
from eprt.compat.deep_ep.event import EventOverlap
from eprt.compat.deep_ep.rows import RowExchange
from eprt.compat.deep_ep.rows_received import RowsHandle
from eprt.compat.deep_ep.setup import BufferSetup
from eprt.compat.deep_ep.streams import CommStream

Payload: TypeAlias = Tensor | tuple[Tensor, Tensor]
Bias: TypeAlias = Tensor | tuple[Tensor | None, ...] | None

MIN_BYTES = 256 << 20
_SIZE_NAME = "num_nvl_bytes (EPRT_DEEP_EP_TOKENS where Config's hint decides)"


class IntranodeHandle(tuple):
    """DeepEP's handle: (rank_prefix_matrix int32 [R, R], None, None, source token int32 [N], is_token_in_rank bool
    [T, R], index among the tokens for a rank int32 [T, R], or -1). DeepEP has queues where the None are."""

    mode: "IntranodeMode"  # that made it
    rows: RowsHandle
    stream: int  # the raw stream on which it was made


class IntranodeMode:
    """The normal mode of a Buffer. Construction and close() are collective.

    num_bytes: of symmetric memory; at least MIN_BYTES are allocated.
    """

    def __init__(self, setup: BufferSetup, num_bytes: int):
        self._num_ranks, self._checks = setup.group.size, setup.checks
        self._streams = CommStream(setup.stream)
        num_bytes, timeout_s = max(num_bytes, MIN_BYTES), setup.timeout_s
        self._exchange = RowExchange(setup.group, num_bytes, timeout_s=timeout_s, size_name=_SIZE_NAME, mask=setup.mask)
        self._layouts: dict[int, DispatchLayout] = {}  # by num_experts

    def layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: EventOverlap | None, async_finish: bool
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        layout = self._layouts.get(num_experts)
        if layout is None:
            layout = self._layouts[num_experts] = DispatchLayout(self._num_ranks, num_experts)
        with self._streams.run_call(async_finish, previous_event):
            per_rank, per_expert, in_rank = layout(topk_idx)
            event = self._end_call(async_finish, [topk_idx], [per_rank, per_expert, in_rank])
        return per_rank, None, per_expert, in_rank, event

    def dispatch(
        self,
        x: Payload,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        expert_alignment: int,
        num_worst_tokens: int,
        num_sms: int,
        previous_event: EventOverlap | None,
        async_finish: bool,
    ) -> tuple[Payload, Tensor | None, Tensor | None, list[int], IntranodeHandle, EventOverlap]:
        values, scale = x if isinstance(x, tuple) else (x, None)
        by_rank = topk_idx is None
        with self._streams.run_call(async_finish, previous_event):
            received = self._exchange.dispatch(
                values,
                num_experts=num_tokens_per_expert.shape[0],
                scale_TG=scale,
                topk_idx_TK=topk_idx,
                topk_weights_TK=topk_weights,
                is_token_in_rank_TR=is_token_in_rank if by_rank else None,
                num_tokens_per_expert_S=num_tokens_per_expert if by_rank else None,
                num_worst_rows=num_worst_tokens,
                expert_alignment=expert_alignment,
                num_sms=num_sms,
            )
            rows, scale_NG = received.handle, received.scale_NG
            scale_NG = None if scale_NG is None else scale_NG.contiguous()  # rows are padded to 16 bytes when sent
            prefix, token = rows.sent_through_RR, rows.source_token_N
            handle = IntranodeHandle((prefix, None, None, token, is_token_in_rank, rows.position_TR))
            handle.mode, handle.rows, handle.stream = self, rows, self._streams.raw_stream()
            read = [values, scale, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert]
            made = [received.x_NH, scale_NG, received.topk_idx_NK, received.topk_weights_NK, token, prefix]
            event = self._end_call(async_finish, read, made)
        payload = received.x_NH if scale_NG is None else (received.x_NH, scale_NG)
        return payload, received.topk_idx_NK, received.topk_weights_NK, received.rows_of_expert, handle, event

    def dispatch_again(
        self, x: Payload, handle: tuple, num_sms: int, previous_event: EventOverlap | None, async_finish: bool
    ) -> tuple[Payload, EventOverlap]:
        handle = self._own_handle("dispatch", handle)
        values, scale = x if isinstance(x, tuple) else (x, None)
        with self._streams.run_call(async_finish, previous_event):
            x_NH, scale_NG = self._exchange.dispatch_again(values, handle.rows, scale_TG=scale, num_sms=num_sms)
            scale_NG = None if scale_NG is None else scale_NG.contiguous()
            self._use_handle(handle)
            event = self._end_call(async_finish, [values, scale], [x_NH, scale_NG])
        return x_NH if scale_NG is None else (x_NH, scale_NG), event

    def combine(
        self,
        y: Tensor,
        handle: tuple,
        topk_weights: Tensor | None,
        biases: tuple[Tensor, ...],
        num_sms: int,
        previous_event: EventOverlap | None,
        async_finish: bool,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        handle = self._own_handle("combine", handle)
        with self._streams.run_call(async_finish, previous_event):
            y_TH, weights_TK = self._exchange.combine(
                y, handle.rows, topk_weights_NK=topk_weights, biases_TH=biases, num_sms=num_sms
            )
            self._use_handle(handle)
            event = self._end_call(async_finish, [y, topk_weights, *biases], [y_TH, weights_TK])
        return y_TH, weights_TK, event

    def close(self) -> None:
        self._exchange.close()
        for layout in self._layouts.values():
            layout.close()

    def _own_handle(self, call: str, handle: tuple) -> IntranodeHandle:
        if not isinstance(handle, IntranodeHandle) or handle.mode is not self:
            self._checks.fail(
                f"{call}: handle must be the object that a dispatch of this Buffer returned, not a copy of its parts, "
                "nor another Buffer's: that one may have other ranks and more room"
            )
        return handle

    def _use_handle(self, handle: IntranodeHandle) -> None:
        """Inside run_call. Tells torch's allocator if a handle's tensors (of one storage) are read on another stream
        than the one on which they were made."""
        if handle.stream != self._streams.raw_stream():
            handle.rows.position_TR.record_stream(torch.cuda.current_stream())

    def _end_call(
        self, async_finish: bool, read: Sequence[Tensor | None], made: Sequence[Tensor | None]
    ) -> EventOverlap:
        """Inside run_call. The event of the call. For an asynchronous call, tells torch's allocator which tensors two
        streams use: the communication stream those that it reads, the caller's those that were made for it."""
        if not async_finish:
            return EventOverlap()
        for tensor in read:
            if tensor is not None:
                tensor.record_stream(self._streams.stream)
        for tensor in made:
            if tensor is not None:
                tensor.record_stream(self._streams.caller)
        return EventOverlap(self._streams.record_event(True))
