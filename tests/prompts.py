"""Batches of prompts whose keys and values are expanded, and what attention makes of them, in float64.

Memory that belongs to no request holds NaN. For the kernel on a GPU (tests/gpu) and without one (tests/emulated).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.gpu.prompt_attention import NOPE, ROPE, VALUE, prompt_attention
from tests.gpu.draw import Draw

SCALE = 0.11
_ROWS_BEHIND = 70  # of NaN


@dataclass
class Prompts:
    """Requests, one after the other."""

    q_TND: Tensor  # with the rotated part, which the kernel gets from q_rope_TNR
    q_rope_TNR: Tensor
    kv_SNE: Tensor
    rope_SR: Tensor
    length_B: Tensor
    start_B1: Tensor

    @staticmethod
    def draw(draw: Draw, tokens: list[int], length: list[int], heads: int, sharpness: float = 1.0) -> "Prompts":
        """tokens: new ones of each request, the last of its `length`. sharpness: of the queries."""

        def normal(rows: int, *shape: int, scale: float = 1.0) -> Tensor:
            x = torch.full((rows + _ROWS_BEHIND, *shape), torch.nan, dtype=torch.bfloat16, device=draw.device)
            x[:rows] = draw.normal(rows, *shape, dtype=torch.bfloat16, scale=scale)
            return x[:rows]

        q = normal(sum(tokens), heads, NOPE + ROPE, scale=sharpness)
        kv, rope = normal(sum(length), heads, NOPE + VALUE), normal(sum(length), ROPE)
        start = torch.tensor([0, *tokens], device=draw.device).cumsum(0).int()
        length_B = torch.tensor(length, dtype=torch.int32, device=draw.device)
        return Prompts(q, q[..., NOPE:].contiguous(), kv, rope, length_B, start)

    def attend(self, heads_together: int | None = None) -> Tensor:
        """[T, N, VALUE]. Rows past the last token stay as they were."""
        tokens, heads, _ = self.q_TND.shape
        out = torch.full((tokens + 3, heads, VALUE), 99.0, dtype=torch.bfloat16, device=self.q_TND.device)
        queries, where = (self.q_TND[..., :NOPE], self.q_rope_TNR), (self.length_B, self.start_B1)
        # The kernel may be told of more positions than there are: their number is a bound.
        kv, rope = (
            x.as_strided((len(x) + _ROWS_BEHIND, *x.shape[1:]), x.stride()) for x in (self.kv_SNE, self.rope_SR)
        )
        prompt_attention(*queries, kv, rope, *where, SCALE, out[:tokens], heads_together)
        assert (out[tokens:] == 99).all()
        return out[:tokens]

    def oracle(self) -> Tensor:
        heads, outs, first, begin = self.kv_SNE.shape[1], [], 0, 0
        keys = torch.cat((self.kv_SNE[..., :NOPE], self.rope_SR[:, None].expand(-1, heads, -1)), -1)
        for length, new in zip(self.length_B.tolist(), self.start_B1.diff().tolist()):
            k, v = (x[begin : begin + length].double() for x in (keys, self.kv_SNE[..., NOPE:]))
            score = torch.einsum("tnd,snd->nts", self.q_TND[first : first + new].double(), k) * SCALE
            position = torch.arange(length, device=k.device)
            weight = score.masked_fill(position > position[length - new :, None], -torch.inf).softmax(-1)
            outs.append(torch.einsum("nts,snv->tnv", weight, v))
            first, begin = first + new, begin + length
        return torch.cat(outs)
