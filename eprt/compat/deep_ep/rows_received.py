"""ReceivedRows: what a dispatch of rows returns. RowTensors: its tensors, made before the rows have arrived.

Knows where rows lie, nothing of how they travel.

T tokens of this rank, N rows received, H hidden, G scales of a row, K top-k, R ranks, S experts of all ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.ep.nvlink.normal import Payload, Routing
from eprt.ep.nvlink.normal_layout import BlockShape, LayoutBuffers
from eprt.gpu.shapes import known_shape


@dataclass(frozen=True)
class RowsHandle:
    """A layout: what combine, and another dispatch of the same layout, need. All tensors are on the GPU."""

    num_tokens: int  # T
    top_k: int  # 0 without topk_idx
    num_experts: int  # S
    sent_through_RR: Tensor  # int32 [R, R], tokens that ranks 0 to i send to rank j: DeepEP's rank_prefix_matrix
    position_TR: Tensor  # int32 [T, R], the token's index among those from here to that rank, or -1: not sent there
    source_token_N: Tensor  # int32 [num_rows], the token's index on its source rank; defined for the first N rows
    buffers: LayoutBuffers  # what the count left, for the kernels
    routing: Routing  # for the kernels

    @property
    def num_rows(self) -> int:
        """Rows of the received tensors: N, or the static bound."""
        return self.source_token_N.shape[0]


@dataclass(frozen=True)
class ReceivedRows:
    """The result of a dispatch of rows.

    The tensors lie in symmetric memory and occupy it as long as any of them (or a view) lives; release them on the
    stream that used them last. When that memory runs low they are ordinary copies. With a static bound the tensors have
    so many rows; beyond the received rows topk_idx is -1 and everything else undefined.
    """

    x_NH: Tensor  # the payload, as it was sent
    scale_NG: Tensor | None  # fp32
    # int64, counted from this rank's first expert; -1: of another rank. None without topk_idx.
    topk_idx_NK: Tensor | None
    topk_weights_NK: Tensor | None  # fp32, 0 where topk_idx is -1
    # Rows for each expert of this rank, rounded up to expert_alignment; [] with a static bound.
    rows_of_expert: list[int]
    handle: RowsHandle


class RowTensors:
    """The tensors of a block of rows: created empty, set to their memory, then cut to length.

    Each step costs the host some microseconds, so only the last one waits for the counts.

    top_k: 0 without topk_idx.
    buffers: of a new layout; None: another batch of a known one, of which only x and scales are received.
    """

    def __init__(self, payload: Payload, top_k: int, buffers: LayoutBuffers | None):
        self._hidden, self._top_k = payload.x.shape[1], top_k
        self.x_NH, self.scale_NG = _empty(payload.x.dtype), None
        if payload.scale is not None:
            self.scale_NG = _empty(payload.scale.dtype)
        self.token_N = self.idx_NK = self.weights_NK = None
        if buffers is not None:
            self.token_N = _empty(torch.int32)
        if top_k:
            self.idx_NK, self.weights_NK = _empty(torch.int64), _empty(torch.float32)

    def set_memory(self, storage: torch.UntypedStorage, shape: BlockShape, rows: int) -> None:
        """The tensors become the first rows of a block."""
        at, K, H = shape.offsets(), self._top_k, self._hidden
        self.x_NH.set_(storage, at["x"] // self.x_NH.element_size(), (rows, H), (H, 1))
        if self.scale_NG is not None:
            self.scale_NG.set_(storage, at["scale"] // 4, (rows, shape.num_scales), (shape.scale_words, 1))
        if self.token_N is not None:
            self.token_N.set_(storage, at["token"] // 4, (rows,), (1,))
        if self.idx_NK is not None and self.weights_NK is not None:
            self.idx_NK.set_(storage, at["entry"] // 8, (rows, K), (K, 1))
            self.weights_NK.set_(storage, at["weight"] // 4, (rows, K), (K, 1))

    def keep_rows(self, rows: int) -> None:
        """Keeps only the first rows."""
        self.x_NH.resize_(rows, self._hidden)
        if self.scale_NG is not None:
            groups = self.scale_NG.shape[1]
            if self.scale_NG.is_contiguous():
                self.scale_NG.resize_(rows, groups)
            else:  # rows are padded
                self.scale_NG.as_strided_((rows, groups), self.scale_NG.stride())
        if self.token_N is not None:
            self.token_N.resize_(rows)
        if self.idx_NK is not None and self.weights_NK is not None:
            self.idx_NK.resize_(rows, self._top_k)
            self.weights_NK.resize_(rows, self._top_k)

    def as_received(self, buffers: LayoutBuffers, routing: Routing) -> ReceivedRows:
        """The result of the dispatch; rows_of_expert is still empty."""
        assert self.token_N is not None
        layout = buffers.field("sent_through"), buffers.field("position"), self.token_N
        handle = RowsHandle(routing.num_tokens, self._top_k, routing.num_slots, *layout, buffers, routing)
        return ReceivedRows(self.x_NH, self.scale_NG, self.idx_NK, self.weights_NK, [], handle)


def _empty(dtype: torch.dtype) -> Tensor:
    return torch.empty_like(known_shape((0,), dtype))
