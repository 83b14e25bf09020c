"""HybridRunner: forward passes of a V4 model over its hybrid cache, without an engine: one request, chunk by chunk."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from eprt.engine.graphs import padding_rows
from eprt.layers.batch import ForwardBatch, HostRows
from eprt.layers.hybrid_cache import PAGE_TOKENS, HybridLayout


class HybridRunner:
    """Memory starts out as NaN, so that a stray read shows; pages are handed out backwards."""

    def __init__(self, model: Any, num_pages: int = 24, dtype: torch.dtype | None = None, index_cache: str = "auto"):
        config = model.config
        formats = config.dtype if dtype is None else dtype, index_cache
        self.model, self.layout = model, HybridLayout.for_model(config, config.v4.compress_ratios, *formats)
        self.device = model.device
        memory_PB = torch.full((num_pages, self.layout.page_bytes), 0xFF, dtype=torch.uint8, device=self.device)
        self.layers = self.layout.layers(memory_PB)
        self._free = list(range(num_pages - 1))

    def log_probs(self, tokens: Tensor, chunk: int = 10**9, lost: int = 0, num_decoded: int = 0) -> Tensor:
        """fp32 [tokens, V] of a request that begins with these tokens. lost: before each chunk so many tokens from its
        first on are computed, and the step is thrown away. num_decoded: so many of the last ones are decodes, by rows,
        each beside a row of padding."""
        with torch.inference_mode():
            return torch.cat([part.log_softmax(-1) for part in self._run_chunks(tokens, chunk, lost, num_decoded)])

    def end_of_context(self, tokens: Tensor, end: int) -> Tensor:
        """Logits [tokens, V] of a chunk that ends before this position, behind whatever is in the pages."""
        num_tail, num_pages = self.layout.tail.num_pages, -(-end // PAGE_TOKENS)
        tail_BF = torch.arange(num_tail, dtype=torch.int32, device=self.device)[None]
        table_BP = torch.arange(num_tail, num_tail + num_pages, dtype=torch.int32, device=self.device)[None]
        with torch.inference_mode():
            return self.model.forward(_batch(tokens, end - len(tokens), table_BP, tail_BF), self.layers)

    def _run_chunks(self, tokens: Tensor, chunk: int, lost: int, num_decoded: int):
        tail_BF = self._take_pages(self.layout.tail.num_pages)
        table_BP = self._take_pages(-(-len(tokens) // PAGE_TOKENS))
        whole, decoded = tokens.split([len(tokens) - num_decoded, num_decoded])
        for start in range(0, len(whole), chunk):
            if lost:
                self.model.forward(_batch(whole[start : start + lost], start, table_BP, tail_BF), self.layers)
            part = whole[start : start + chunk]
            yield self.model.forward(_batch(part, start, table_BP, tail_BF), self.layers)
        for position, token in enumerate(decoded, len(whole)):
            yield self.model.forward(self._decode(token, position, table_BP, tail_BF), self.layers)[:1]

    def _decode(self, token: Tensor, position: int, table_BP: Tensor, tail_BF: Tensor) -> ForwardBatch:
        num_pages, device = table_BP.shape[1], table_BP.device
        batch = padding_rows(2, num_pages, PAGE_TOKENS, self.layers[0].padding_page, device, num_tail=tail_BF.shape[1])
        batch.token_id_T[0], batch.position_T[0], batch.seq_len_B[0] = token, position, position + 1
        assert batch.tail_BF is not None
        batch.page_table_BP[:1], batch.tail_BF[:1] = table_BP, tail_BF
        return batch

    def _take_pages(self, num: int) -> Tensor:
        return torch.tensor([[self._free.pop() for _ in range(num)]], dtype=torch.int32, device=self.device)


def _batch(tokens: Tensor, start: int, table_BP: Tensor, tail_BF: Tensor) -> ForwardBatch:
    num, device = len(tokens), table_BP.device
    host = HostRows(np.array([0, num], np.int32), np.array([start + num], np.int32), tail_BF.cpu().numpy())
    return ForwardBatch(
        token_id_T=tokens.to(device),
        position_T=torch.arange(start, start + num, device=device),
        kv_slot_T=torch.zeros(num, dtype=torch.int64, device=device),
        page_table_BP=table_BP,
        seq_len_B=torch.from_numpy(host.seq_len_B).to(device),
        query_start_B1=torch.from_numpy(host.query_start_B1).to(device),
        num_decode=0,
        logits_idx=torch.arange(num, device=device),
        tail_BF=tail_BF,
        host=host,
    )
