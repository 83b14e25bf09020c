"""One batch of one rank for the normal-mode tables: bf16 tokens, the same in fp8, and their routing."""

import torch

from eprt import EPGroup
from eprt.ep.reference import quantize


class NormalCase:
    """One batch of one rank: bf16, the same in fp8, and its routing."""

    def __init__(self, group: EPGroup, hidden: int, experts: int, top_k: int, num_tokens: int):
        generator = torch.Generator("cuda").manual_seed(group.rank)
        self.group, self.experts, self.num_tokens = group, experts, num_tokens
        self.x = torch.randn(num_tokens, hidden, device="cuda", generator=generator).bfloat16()
        self.fp8, self.scale = quantize(self.x)
        scores = torch.rand(num_tokens, experts, device="cuda", generator=generator)
        self.slots = scores.topk(top_k).indices
        self.weights = torch.rand(num_tokens, top_k, device="cuda", generator=generator)
        ranks = self.slots // (experts // group.size)
        sent = group.allgather([int((ranks == r).any(1).sum()) for r in range(group.size)])
        leaving = [sum(row) - row[r] for r, row in enumerate(sent)]
        coming = [sum(row[r] for row in sent) - sent[r][r] for r in range(group.size)]
        self.crossing = max(*leaving, *coming, 1)  # rows over the busiest link, one way
        self.received = max(sum(row[r] for row in sent) for r in range(group.size))
        self.y = torch.randn(sum(row[group.rank] for row in sent), hidden, device="cuda").bfloat16()

    def row_bytes(self, call: str) -> int:
        return self.x.shape[1] + self.scale.shape[1] * 4 if "fp8" in call else self.x.shape[1] * 2
