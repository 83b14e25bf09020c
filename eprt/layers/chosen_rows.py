"""ChosenRows: a batch cut by how much its rows see.

A row that sees at most top_k tokens attends to all of them; of more the indexer chooses.

Knows nothing of scores. Lengths are read where the host has them: on the CPU. On a GPU a batch is not cut; all its rows
are left to the indexer, unless the host knows that no row needs it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eprt.layers.batch import ForwardBatch


@dataclass(frozen=True)
class ChosenRows:
    """X rows to choose for; the other rows, the first ones of their requests, are a batch of their own."""

    whole: ForwardBatch | None  # the rows that attend to all tokens, or None for no such rows
    whole_W: Tensor | None  # int64, where they are in the batch; None: all of them are
    row_X: Tensor | None  # int64, where the others are; None: all of them are
    position_X: Tensor  # int64
    request_X: Tensor  # int32, rows of the batch's page table
    length_X: Tensor  # int32, tokens that each row sees

    @property
    def num_rows(self) -> int:
        return self.position_X.shape[0]

    @staticmethod
    def from_batch(batch: ForwardBatch, page_size: int, top_k: int) -> "ChosenRows":
        position_T = batch.position_T
        most_seen = batch.page_table_BP.shape[1] * page_size
        if batch.longest is not None:
            most_seen = min(most_seen, batch.longest)
        if most_seen <= top_k:
            none = position_T[:0]
            return ChosenRows(batch, None, none, none, none.int(), none.int())
        request_T = _requests_of_rows(batch)
        if position_T.is_cuda:
            return ChosenRows(None, None, None, position_T, request_T, (position_T + 1).int())
        is_chosen_T = position_T >= top_k
        row_X, whole_W = is_chosen_T.nonzero().squeeze(1), (~is_chosen_T).nonzero().squeeze(1)
        position_X = position_T[row_X]
        others = row_X, position_X, request_T[row_X], (position_X + 1).int()
        if len(row_X) == 0:
            return ChosenRows(batch, None, *others)
        whole = _part_of(batch, whole_W, request_T, top_k) if len(whole_W) else None
        return ChosenRows(whole, whole_W, *others)


def _requests_of_rows(batch: ForwardBatch) -> Tensor:
    """int32 [T]: the request of each row."""
    T, B = batch.num_tokens, batch.seq_len_B.shape[0]
    row_T = torch.arange(T, dtype=torch.int32, device=batch.position_T.device)
    if T == B == batch.num_decode:
        return row_T
    return torch.searchsorted(batch.query_start_B1[1:].contiguous(), row_T, right=True, out_int32=True)


def _part_of(batch: ForwardBatch, row_W: Tensor, request_T: Tensor, most_seen: int) -> ForwardBatch:
    """The batch of these rows, the first ones of each request: those that see at most so many tokens."""
    count_B = torch.bincount(request_T[row_W], minlength=batch.seq_len_B.shape[0])
    kept = count_B.nonzero().squeeze(1)
    start_B1 = torch.nn.functional.pad(count_B[kept].cumsum(0), (1, 0)).int()
    return replace(
        batch,
        token_id_T=batch.token_id_T[row_W],
        position_T=batch.position_T[row_W],
        kv_slot_T=batch.kv_slot_T[row_W],
        page_table_BP=batch.page_table_BP[kept],
        seq_len_B=batch.seq_len_B[kept].clamp(max=most_seen),
        query_start_B1=start_B1,
        num_decode=int((kept < batch.num_decode).sum()),
        num_context=None,
    )
