"""Before the first request: every rank computes a few batches of padding, so that kernels are compiled before anybody
waits for them, and memory is taken before the cache is trusted to fit."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from eprt.layers.batch import ForwardBatch, Split


def warm_up(
    model, kv_cache_LPSD: Tensor, chunk_size: int, padding_page: int, with_hidden: bool,
    overlap_of: Callable[[int], str] = lambda num_tokens: "none",
) -> None:  # fmt: skip
    """Collective. Prompts of a few lengths up to chunk_size, all in one page that belongs to nobody.

    overlap_of: what a step of so many tokens overlaps; that is tried besides.
    """
    page_size = kv_cache_LPSD.shape[2]
    run = model.forward_with_hidden if with_hidden else model.forward
    for length in sorted({min(length, chunk_size) for length in (1, 16, 32, 64, 128, 512, chunk_size)}):
        batch = _prompt(length, page_size, padding_page, kv_cache_LPSD.device)
        run(batch, kv_cache_LPSD)
        if overlap_of(length) == "tbo":
            run(replace(batch, overlap="tbo", split=Split.of([0, length])), kv_cache_LPSD)
    torch.cuda.synchronize()


def _prompt(length: int, page_size: int, page: int, device: torch.device) -> ForwardBatch:
    """One request of `length` tokens, each of which sees and overwrites the same page."""
    position = torch.arange(length, device=device)
    return ForwardBatch(
        token_id_T=torch.zeros(length, dtype=torch.int64, device=device),
        position_T=position,
        kv_slot_T=page * page_size + position % page_size,
        page_table_BP=torch.full((1, -(-length // page_size)), page, dtype=torch.int32, device=device),
        seq_len_B=torch.tensor([length], dtype=torch.int32, device=device),
        query_start_B1=torch.tensor([0, length], dtype=torch.int32, device=device),
        num_decode=0,
        logits_idx=torch.zeros(1, dtype=torch.int64, device=device),
        mode="normal",
    )
