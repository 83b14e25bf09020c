"""ForwardBatch: one step's tokens of one rank, as tensors. Built by engine/runner.py, read by the layers."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """T tokens of B requests, packed request after request. The first num_decode requests have one token each.

    token_id_T, position_T: int64 [T]. kv_slot_T: int64 [T], where each token's cache entry goes.
    page_table_BP: int32 [B, P]. seq_len_B: int32 [B], context length including the new tokens.
    query_start_B1: int32 [B+1], first row of each request (packed; query_start[:num_decode+1] = 0..num_decode).
    logits_idx: int64 [X], rows of T whose logits are wanted.
    mode: MoE mode of this step, equal on all ranks: "normal" or "low_latency".
    T = B = 0 is a valid batch: the rank only serves its experts to the others.
    Requests may share pages that another request of the same batch fills: each layer inserts all T entries before it
    attends.
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

    @property
    def num_tokens(self) -> int:
        return self.token_id_T.shape[0]

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decode
