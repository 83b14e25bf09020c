"""HybridRunner: forward passes of a V4 model over its hybrid cache, without an engine: one request, chunk by chunk."""

from typing import Any

import torch
from torch import Tensor

from eprt.layers.batch import ForwardBatch
from eprt.layers.hybrid_cache import PAGE_TOKENS, HybridLayout


class HybridRunner:
    """Memory starts out as NaN, so that a stray read shows; pages are handed out backwards."""

    def __init__(self, model: Any, num_pages: int = 24, dtype: torch.dtype | None = None, index_cache: str = "auto"):
        config = model.config
        formats = config.dtype if dtype is None else dtype, index_cache
        self.model, self.layout = model, HybridLayout.for_model(config, config.v4.compress_ratios, *formats)
        memory_PB = torch.full((num_pages, self.layout.page_bytes), 0xFF, dtype=torch.uint8)
        self.layers = self.layout.layers(memory_PB)
        self._free = list(range(num_pages))

    def log_probs(self, tokens: Tensor, chunk: int = 10**9, lost: int = 0) -> Tensor:
        """fp32 [tokens, V] of a request that begins with these tokens. lost: before each chunk so many tokens from its
        first on are computed, and the step is thrown away."""
        with torch.inference_mode():
            return torch.cat([part.log_softmax(-1) for part in self._run_chunks(tokens, chunk, lost)])

    def end_of_context(self, tokens: Tensor, end: int) -> Tensor:
        """Logits [tokens, V] of a chunk that ends before this position, behind whatever is in the pages."""
        num_tail, num_pages = self.layout.tail.num_pages, -(-end // PAGE_TOKENS)
        tail_BF = torch.arange(num_tail, dtype=torch.int32)[None]
        table_BP = torch.arange(num_tail, num_tail + num_pages, dtype=torch.int32)[None]
        with torch.inference_mode():
            return self.model.forward(_batch(tokens, end - len(tokens), table_BP, tail_BF), self.layers)

    def _run_chunks(self, tokens: Tensor, chunk: int, lost: int):
        tail_BF = self._take_pages(self.layout.tail.num_pages)
        table_BP = self._take_pages(-(-len(tokens) // PAGE_TOKENS))
        for start in range(0, len(tokens), chunk):
            if lost:
                self.model.forward(_batch(tokens[start : start + lost], start, table_BP, tail_BF), self.layers)
            part = tokens[start : start + chunk]
            yield self.model.forward(_batch(part, start, table_BP, tail_BF), self.layers)

    def _take_pages(self, num: int) -> Tensor:
        return torch.tensor([[self._free.pop() for _ in range(num)]], dtype=torch.int32)


def _batch(tokens: Tensor, start: int, table_BP: Tensor, tail_BF: Tensor) -> ForwardBatch:
    num = len(tokens)
    return ForwardBatch(
        token_id_T=tokens,
        position_T=torch.arange(start, start + num),
        kv_slot_T=torch.zeros(num, dtype=torch.int64),
        page_table_BP=table_BP,
        seq_len_B=torch.tensor([start + num], dtype=torch.int32),
        query_start_B1=torch.tensor([0, num], dtype=torch.int32),
        num_decode=0,
        logits_idx=torch.arange(num),
        tail_BF=tail_BF,
    )
