"""RowExchange: tokens as one row per (token, destination rank), and their way back. What DeepEP's normal mode offers.

The same kernels as the nvlink backend's normal mode (nvlink_normal.py), with another place for the rows: received rows
are not grouped by expert, but ordered by (source rank, token), each once. combine sums what the ranks give back for a
token, unweighted. Launches on the current stream; knows nothing of other streams or events.

T tokens of this rank, N rows received, H hidden, K top-k, R ranks, S experts of all ranks, E experts of a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from eprt.ep.group import EPGroup


@dataclass(frozen=True)
class RowsHandle:
    """A layout: what combine, and another dispatch of the same layout, need. All tensors are on the GPU.

    num_tokens: T. num_rows: rows of the received tensors: N, or the static bound. top_k: 0 without topk_idx.
    num_experts: S.
    sent_RR: int32 [R, R], tokens that rank i sends to rank j; equal on all ranks. Its cumsum(0) is DeepEP's
        rank_prefix_matrix.
    position_TR: int32 [T, R], the token's place among those from here to that rank, or -1 (its sign is DeepEP's
        is_token_in_rank).
    source_token_N: int32 [num_rows], the token's index on its source rank; defined for the first N rows.
    """

    num_tokens: int
    num_rows: int
    top_k: int
    num_experts: int
    sent_RR: Tensor
    position_TR: Tensor
    source_token_N: Tensor


@dataclass(frozen=True)
class ReceivedRows:
    """What came. The tensors lie in symmetric memory and keep it for as long as any of them (or a view) lives.

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


class RowExchange:
    """Construction and close() are collective, and so is every other call: all ranks, in the same order.

    num_bytes: of symmetric memory, equal on all ranks. Holds received rows while their tensors live, and during
    combine the rows on their way back: T * min(K, R) * (2 H + 4 K) bytes. num_sms: thread blocks; default: chosen.
    timeout_s: deadline of every wait. Past it a kernel goes on without the late rank; the next call raises
    EPTimeoutError, as does the host's own wait for counts.
    """

    def __init__(
        self, group: EPGroup, num_bytes: int, *, timeout_s: float, num_sms: int | None = None, stats: bool = True
    ): ...

    def dispatch(
        self,
        x_TH: Tensor,
        *,
        num_experts: int,
        scale_TG: Tensor | None = None,
        topk_idx_TK: Tensor | None = None,
        topk_weights_TK: Tensor | None = None,
        is_token_in_rank_TR: Tensor | None = None,
        num_tokens_per_expert_S: Tensor | None = None,
        num_worst_rows: int = 0,
        expert_alignment: int = 1,
        num_sms: int | None = None,
    ) -> ReceivedRows:
        """One row to each rank a token goes to.

        x_TH: contiguous, of any dtype; a row is a multiple of 16 bytes, at a multiple of 16. scale_TG: 4-byte elements,
        any strides. topk_idx_TK: int32 or int64, -1 masks; topk_weights_TK: fp32 (both or neither).
        is_token_in_rank_TR: bool, instead of topk_idx_TK; then num_tokens_per_expert_S (int32) gives rows_of_expert.
        num_worst_rows: static bound; the host then does not wait (and the call may be captured in a graph). 0: the host
        waits for the counts, and the tensors have N rows.
        Raises ValueError (bad input; rows do not fit), EPTimeoutError.
        """
        raise NotImplementedError

    def dispatch_again(
        self, x_TH: Tensor, handle: RowsHandle, *, scale_TG: Tensor | None = None, num_sms: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Other tokens of the same layout: x_NH and scale_NG. No counting, no exchange of counts, no host wait."""
        raise NotImplementedError

    def combine(
        self,
        y_NH: Tensor,
        handle: RowsHandle,
        *,
        topk_weights_NK: Tensor | None = None,
        biases_TH: Sequence[Tensor] = (),
        num_sms: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """bf16 [T, H], the fp32 sum of a token's rows over ranks in their order, rounded once; with up to two biases
        (bf16 [T, H]) added first. With topk_weights_NK (fp32) also their sum over ranks, fp32 [T, K].

        y_NH: bf16, contiguous, H a multiple of 8, rows as received. A handle may be combined any number of times.
        """
        raise NotImplementedError

    def mask_rank(self, rank: int, masked: bool = True) -> None:
        """Goes on without a rank: it is sent nothing, nobody waits for it, its rows add nothing."""
        raise NotImplementedError

    def query_mask(self) -> Tensor:
        """int32 [R] on the GPU: 1 for masked ranks."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees all memory. Collective while all ranks live; never hangs when some do not."""
        raise NotImplementedError
