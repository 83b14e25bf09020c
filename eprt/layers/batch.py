"""ForwardBatch: one step's tokens of one rank, as tensors. Built by engine/runner.py, read by the layers."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Where a batch is cut in two; plain integers, so that nothing waits for a GPU.

    token: first of the second half. first_end: requests of the first half. second_begin: first request of the second;
    first_end - 1 where the cut goes through a request, whose two parts then are requests of their own, sharing pages.
    """

    token: int
    first_end: int
    second_begin: int

    @staticmethod
    def of(query_start_B1: Sequence[int]) -> "Split":
        """In the middle, also of a prompt. query_start_B1: as in ForwardBatch. The first half has the odd token."""
        token = (query_start_B1[-1] + 1) // 2
        first_end = bisect_left(query_start_B1, token)
        return Split(token, first_end, bisect_right(query_start_B1, token) - 1 if token else 0)

    @staticmethod
    def of_decodes(num_tokens: int) -> "Split":
        """Of a batch whose requests have one token each."""
        token = (num_tokens + 1) // 2
        return Split(token, token, token)


@dataclass(frozen=True)
class ForwardBatch:
    """T tokens of B requests, packed request after request. The first num_decode requests have one token each.

    token_id_T, position_T: int64 [T]. kv_slot_T: int64 [T], where each token's cache entry goes.
    page_table_BP: int32 [B, P]. seq_len_B: int32 [B], context length including the new tokens.
    query_start_B1: int32 [B+1], first row of each request (packed; query_start[:num_decode+1] = 0..num_decode).
    logits_idx: int64 [X], rows of T whose logits are wanted.
    mode: MoE mode of this step, equal on all ranks: "normal" or "low_latency".
    overlap: what runs beside what (overlap.py), equal on all ranks: "none", "tbo" or "sbo". split: for "tbo".
    first_row: of the step's rows, the first that is here (second halves).
    num_context: sum of seq_len_B over the requests behind the decodes, or more; None where the host does not know.
    T = B = 0 is a valid batch: the rank only serves its experts to the others.
    Requests may share pages that an earlier request of the same batch fills: each layer inserts all T entries before it
    attends, of a first half before those of a second.
    """

    token_id_T: Tensor
    position_T: Tensor
    kv_slot_T: Tensor
    page_table_BP: Tensor
    seq_len_B: Tensor
    query_start_B1: Tensor
    num_decode: int
    logits_idx: Tensor
    mode: str = "normal"
    overlap: str = "none"
    split: Split | None = None
    first_row: int = 0
    num_context: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_id_T.shape[0]

    def halves(self) -> tuple["ForwardBatch", "ForwardBatch"]:
        """Two batches, to be computed in this order; either may be empty. Their logits_idx is that of the whole."""
        cut = self.split or Split.of_decodes(self.num_tokens)
        if self.split is None and self.num_decode < self.num_tokens:
            raise ValueError(f"a batch of {self.num_tokens} tokens, {self.num_decode} of them decodes, lacks its split")
        rows, requests = slice(cut.token), slice(cut.first_end)
        behind_B = (self.query_start_B1[1 : cut.first_end + 1] - cut.token).clamp(min=0)
        first = replace(
            self,
            **{name: getattr(self, name)[rows] for name in _PER_TOKEN},
            page_table_BP=self.page_table_BP[requests],
            seq_len_B=self.seq_len_B[requests] - behind_B,
            query_start_B1=self.query_start_B1[: cut.first_end + 1].clamp(max=cut.token),
            num_decode=min(self.num_decode, cut.token),
            split=None,
        )
        rows, requests = slice(cut.token, None), slice(cut.second_begin, None)
        second = replace(
            self,
            **{name: getattr(self, name)[rows] for name in _PER_TOKEN},
            page_table_BP=self.page_table_BP[requests],
            seq_len_B=self.seq_len_B[requests],
            query_start_B1=(self.query_start_B1[cut.second_begin :] - cut.token).clamp(min=0),
            num_decode=self.num_decode - first.num_decode,
            split=None,
            first_row=self.first_row + cut.token,
        )
        return first, second


_PER_TOKEN = ("token_id_T", "position_T", "kv_slot_T")
