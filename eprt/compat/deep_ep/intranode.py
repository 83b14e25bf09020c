"""IntranodeMode: DeepEP's normal dispatch and combine over eprt's RowExchange.

T tokens of this rank, N tokens received, H hidden, K top-k, R ranks, E experts of all ranks.
"""

from typing import TypeAlias

import torch
from torch import Tensor

from eprt.compat.deep_ep.checks import Checks
from eprt.compat.deep_ep.event import EventOverlap
from eprt.compat.deep_ep.layout import Layout
from eprt.compat.deep_ep.rows import RowExchange
from eprt.compat.deep_ep.rows_received import RowsHandle
from eprt.compat.deep_ep.streams import CommStream
from eprt.ep.group.group import EPGroup

Payload: TypeAlias = Tensor | tuple[Tensor, Tensor]
Bias: TypeAlias = Tensor | tuple[Tensor | None, ...] | None

MIN_BYTES = 256 << 20
_SIZE_NAME = "num_nvl_bytes (EPRT_DEEP_EP_TOKENS where Config's hint decides)"


class IntranodeHandle(tuple):
    """DeepEP's handle: (rank_prefix_matrix int32 [R, R], None, None, source token int32 [N], is_token_in_rank bool
    [T, R], place among the tokens for a rank int32 [T, R] or -1). The None stand for DeepEP's queues. rows: eprt's own.
    mode: whose it is. stream: the raw one it was made on.
    """

    mode: "IntranodeMode"
    rows: RowsHandle
    stream: int


class IntranodeMode:
    """Construction and close() are collective. stream: for calls with async_finish. mask: int32 [R] on the GPU."""

    def __init__(
        self, group: EPGroup, num_bytes: int, *, stream: torch.cuda.Stream, checks: Checks, timeout_s: float,
        mask: Tensor,
    ):  # fmt: skip
        self._num_ranks, self._checks = group.size, checks
        self._streams = CommStream(stream)
        self._exchange = RowExchange(
            group, max(num_bytes, MIN_BYTES), timeout_s=timeout_s, size_name=_SIZE_NAME, mask=mask
        )
        self._layouts: dict[int, Layout] = {}  # by num_experts

    def layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: EventOverlap | None, async_finish: bool
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        layout = self._layouts.get(num_experts)
        if layout is None:
            layout = self._layouts[num_experts] = Layout(self._num_ranks, num_experts)
        with self._streams.run(async_finish, previous_event):
            per_rank, per_expert, in_rank = layout(topk_idx)
            event = self._event(async_finish, [topk_idx], [per_rank, per_expert, in_rank])
        return per_rank, None, per_expert, in_rank, event

    def dispatch(
        self, x: Payload, is_token_in_rank: Tensor, num_tokens_per_expert: Tensor, topk_idx: Tensor | None,
        topk_weights: Tensor | None, expert_alignment: int, num_worst_tokens: int, num_sms: int,
        previous_event: EventOverlap | None, async_finish: bool,
    ) -> tuple[Payload, Tensor | None, Tensor | None, list[int], IntranodeHandle, EventOverlap]:  # fmt: skip
        values, scale = x if isinstance(x, tuple) else (x, None)
        by_rank = topk_idx is None
        with self._streams.run(async_finish, previous_event):
            received = self._exchange.dispatch(
                values, num_experts=num_tokens_per_expert.shape[0], scale_TG=scale, topk_idx_TK=topk_idx,
                topk_weights_TK=topk_weights, is_token_in_rank_TR=is_token_in_rank if by_rank else None,
                num_tokens_per_expert_S=num_tokens_per_expert if by_rank else None, num_worst_rows=num_worst_tokens,
                expert_alignment=expert_alignment, num_sms=num_sms,
            )  # fmt: skip
            rows, scale_NG = received.handle, received.scale_NG
            scale_NG = None if scale_NG is None else scale_NG.contiguous()  # rows are padded to 16 bytes on the wire
            prefix, token = rows.sent_through_RR, rows.source_token_N
            handle = IntranodeHandle((prefix, None, None, token, is_token_in_rank, rows.position_TR))
            handle.mode, handle.rows, handle.stream = self, rows, self._streams.raw()
            event = self._event(
                async_finish, [values, scale, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert],
                [received.x_NH, scale_NG, received.topk_idx_NK, received.topk_weights_NK, token, prefix],
            )  # fmt: skip
        payload = received.x_NH if scale_NG is None else (received.x_NH, scale_NG)
        return payload, received.topk_idx_NK, received.topk_weights_NK, received.rows_of_expert, handle, event

    def dispatch_again(
        self, x: Payload, handle: tuple, num_sms: int, previous_event: EventOverlap | None, async_finish: bool
    ) -> tuple[Payload, EventOverlap]:
        handle = self._own("dispatch", handle)
        values, scale = x if isinstance(x, tuple) else (x, None)
        with self._streams.run(async_finish, previous_event):
            x_NH, scale_NG = self._exchange.dispatch_again(values, handle.rows, scale_TG=scale, num_sms=num_sms)
            scale_NG = None if scale_NG is None else scale_NG.contiguous()
            self._use(handle)
            event = self._event(async_finish, [values, scale], [x_NH, scale_NG])
        return x_NH if scale_NG is None else (x_NH, scale_NG), event

    def combine(
        self, y: Tensor, handle: tuple, topk_weights: Tensor | None, biases: tuple[Tensor, ...], num_sms: int,
        previous_event: EventOverlap | None, async_finish: bool,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:  # fmt: skip
        handle = self._own("combine", handle)
        with self._streams.run(async_finish, previous_event):
            y_TH, weights_TK = self._exchange.combine(
                y, handle.rows, topk_weights_NK=topk_weights, biases_TH=biases, num_sms=num_sms
            )
            self._use(handle)
            event = self._event(async_finish, [y, topk_weights, *biases], [y_TH, weights_TK])
        return y_TH, weights_TK, event

    def close(self) -> None:
        self._exchange.close()
        for layout in self._layouts.values():
            layout.close()

    def _own(self, call: str, handle: tuple) -> IntranodeHandle:
        if not isinstance(handle, IntranodeHandle) or handle.mode is not self:
            self._checks.fail(
                f"{call}: handle must be the object that a dispatch of this Buffer returned, not a copy of its parts, "
                "nor another Buffer's: that one may have other ranks and more room"
            )
        return handle

    def _use(self, handle: IntranodeHandle) -> None:
        """Inside run(). Tells the allocator when a handle's tensors (one storage) are read on another stream than they
        were made on."""
        if handle.stream != self._streams.raw():
            handle.rows.position_TR.record_stream(torch.cuda.current_stream())

    def _event(self, async_finish: bool, read: list[Tensor | None], made: list[Tensor | None]) -> EventOverlap:
        """Inside run(). Tells the allocator on which other stream tensors are in use: those read on the communication
        stream, those made there on the caller's."""
        if not async_finish:
            return EventOverlap()
        for tensor in read:
            if tensor is not None:
                tensor.record_stream(self._streams.stream)
        for tensor in made:
            if tensor is not None:
                tensor.record_stream(self._streams.caller)
        return EventOverlap(self._streams.event(True))
