"""What a dispatch of rows returns, and how its tensors are made before the rows are there.

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
    """A layout: what combine, and another dispatch of the same layout, need. All tensors are on the GPU.

    num_tokens: T. top_k: 0 without topk_idx. num_experts: S.
    sent_through_RR: int32 [R, R], tokens that ranks 0 to i send to rank j: DeepEP's rank_prefix_matrix.
    position_TR: int32 [T, R], the token's place among those from here to that rank, or -1 (its sign is DeepEP's
        is_token_in_rank).
    source_token_N: int32 [num_rows], the token's index on its source rank; defined for the first N rows.
    buffers, routing: for the kernels.
    """

    num_tokens: int
    top_k: int
    num_experts: int
    sent_through_RR: Tensor
    position_TR: Tensor
    source_token_N: Tensor
    buffers: LayoutBuffers
    routing: Routing

    @property
    def num_rows(self) -> int:
        """Of the received tensors: N, or the static bound."""
        return self.source_token_N.shape[0]

    @property
    def sent_RR(self) -> Tensor:
        """int32 [R, R], tokens that rank i sends to rank j; equal on all ranks."""
        return self.buffers.field("sent")


@dataclass(frozen=True)
class ReceivedRows:
    """What came. The tensors lie in symmetric memory and keep it for as long as any of them (or a view) lives; drop
    them on the stream that used them last. When that memory runs low they are ordinary copies.

    x_NH: the payload, as it was sent. scale_NG: fp32 [N, G], or None.

    topk_idx_NK: int64, experts counted from this rank's first, -1 for those of other ranks; None without topk_idx.
    topk_weights_NK: fp32, 0 where topk_idx is -1.
    rows_of_expert: rows for each expert of this rank, each rounded up to expert_alignment; [] with a static bound.
    With a static bound the tensors have so many rows; beyond the received ones topk_idx is -1, all else undefined.
    """

    x_NH: Tensor
    scale_NG: Tensor | None
    topk_idx_NK: Tensor | None
    topk_weights_NK: Tensor | None
    rows_of_expert: list[int]
    handle: RowsHandle


class RowTensors:
    """Tensors of a block of rows. Made empty, placed, and cut to length: each costs the host some microseconds, so only
    the last is left for when the counts are there."""

    def __init__(self, payload: Payload, top_k: int, buffers: LayoutBuffers | None):
        """buffers: of a new layout. Without, there are only x and scales."""
        self._hidden, self._top_k = payload.x.shape[1], top_k
        self.x_NH, self.scale_NG = _empty(payload.x.dtype), None
        if payload.scale is not None:
            self.scale_NG = _empty(payload.scale.dtype)
        self.token_N = self.idx_NK = self.weights_NK = None
        if buffers is not None:
            self.token_N = _empty(torch.int32)
        if top_k:
            self.idx_NK, self.weights_NK = _empty(torch.int64), _empty(torch.float32)

    def place(self, storage: torch.UntypedStorage, shape: BlockShape, rows: int) -> None:
        """They are the first rows of a block of this shape."""
        at, K, H = shape.offsets(), self._top_k, self._hidden
        self.x_NH.set_(storage, at["x"] // self.x_NH.element_size(), (rows, H), (H, 1))
        if self.scale_NG is not None:
            self.scale_NG.set_(storage, at["scale"] // 4, (rows, shape.num_scales), (shape.scale_words, 1))
        if self.token_N is not None:
            self.token_N.set_(storage, at["token"] // 4, (rows,), (1,))
        if self.idx_NK is not None and self.weights_NK is not None:
            self.idx_NK.set_(storage, at["entry"] // 8, (rows, K), (K, 1))
            self.weights_NK.set_(storage, at["weight"] // 4, (rows, K), (K, 1))

    def keep(self, rows: int) -> None:
        """Only the first ones."""
        self.x_NH.resize_(rows, self._hidden)
        if self.scale_NG is not None:
            groups = self.scale_NG.shape[1]
            if self.scale_NG.is_contiguous():
                self.scale_NG.resize_(rows, groups)
            else:  # padded rows
                self.scale_NG.as_strided_((rows, groups), self.scale_NG.stride())
        if self.token_N is not None:
            self.token_N.resize_(rows)
        if self.idx_NK is not None and self.weights_NK is not None:
            self.idx_NK.resize_(rows, self._top_k)
            self.weights_NK.resize_(rows, self._top_k)

    def received(self, top_k: int, buffers: LayoutBuffers, routing: Routing) -> ReceivedRows:
        """With nothing in rows_of_expert yet."""
        assert self.token_N is not None
        handle = RowsHandle(
            routing.num_tokens, top_k, routing.num_slots, buffers.field("sent_through"), buffers.field("position"),
            self.token_N, buffers, routing,
        )  # fmt: skip
        return ReceivedRows(self.x_NH, self.scale_NG, self.idx_NK, self.weights_NK, [], handle)


def _empty(dtype: torch.dtype) -> Tensor:
    return torch.empty_like(known_shape((0,), dtype))
