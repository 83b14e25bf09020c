"""Random weights, cache pages, row counts and decode batches on one GPU."""

import math

import torch
from torch import Tensor

from benchmarks.shapes import LATENT, ROPE
from eprt.layers.batch import ForwardBatch
from eprt.ops.kv_format import KVFormat
from eprt.ops.weight import FP4_BLOCK, Weight


def fp8_weight(*shape: int) -> Weight:
    """Random e4m3 (without its NaNs) under scales that keep products in range."""
    data = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    for part in data.view(-1, *shape[-2:]):
        part.copy_(torch.randn(part.shape, device="cuda").mul_(64))
    scale = torch.full((*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)), shape[-1] ** -0.5 / 64, device="cuda")
    return Weight(data, scale)


def int8_weight(*shape: int) -> Weight:
    """Random int8 under scales that keep products in range."""
    data = torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")
    return Weight(data, torch.full(shape[:-1], shape[-1] ** -0.5 / 64, device="cuda"))


def fp4_weight(*shape: int) -> Weight:
    """Random e2m1 under scales that keep products in range."""
    data = torch.randint(256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device="cuda")
    exponent = 127 - round(math.log2(3 * shape[-1] ** 0.5))
    scale = torch.randint(exponent - 1, exponent + 2, (*shape[:-1], shape[-1] // FP4_BLOCK), device="cuda")
    return Weight(data, scale.to(torch.uint8))


def bf16_weight(*shape: int) -> Weight:
    return Weight(torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(shape[-1] ** -0.5))


def drawn_rows(num_experts: int, mean: int) -> Tensor:
    """int32 [E]: rows of each expert when each of E * mean choices falls on any of them."""
    chosen = torch.randint(num_experts, (num_experts * mean,), device="cuda")
    return chosen.bincount(minlength=num_experts).int()


def latent_cache(tokens: int, fp8: bool) -> Tensor:
    """Pages of 64."""
    entry = KVFormat(LATENT, ROPE, torch.uint8 if fp8 else torch.bfloat16)
    kv = torch.randn(tokens, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
    return entry.encode(kv).view(-1, 64, entry.width)


def decode_batch(requests: int, num_pages: int, page_size: int, vocab_size: int) -> ForwardBatch:
    """Every request at the last position of its own pages."""
    position = torch.full((requests,), num_pages * page_size - 1, device="cuda")
    table = torch.arange(requests * num_pages, dtype=torch.int32, device="cuda").view(requests, num_pages)
    return ForwardBatch(
        token_id_T=torch.randint(vocab_size, (requests,), device="cuda"),
        position_T=position,
        kv_slot_T=table[:, -1].long() * page_size + page_size - 1,
        page_table_BP=table,
        seq_len_B=(position + 1).int(),
        query_start_B1=torch.arange(requests + 1, dtype=torch.int32, device="cuda"),
        num_decode=requests,
        logits_idx=torch.arange(requests, device="cuda"),
        mode="low_latency",
    )
