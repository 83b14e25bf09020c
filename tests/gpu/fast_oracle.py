"""The oracle of normal mode for thousands of tokens: tensor operations in place of eprt.ep.reference's loops.

tests/unit/ep/test_fast_oracle.py compares the two bit for bit. Takes the tokens of all ranks; works on any device.
An entry is a (source rank, token, k) with a slot; entries are numbered in that order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.ep import reference
from eprt.ep.config import EPConfig
from eprt.ep.reference import SentTokens


@dataclass(frozen=True)
class Rows:
    """What a rank receives. row: where each of its entries lies; source, token, slot: of that entry (slot: local)."""

    x: Tensor
    scale: Tensor | None
    count: Tensor
    row: Tensor
    source: Tensor
    token: Tensor
    slot: Tensor

    @property
    def num_rows(self) -> int:
        return self.x.shape[0]


def payload(config: EPConfig, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return reference.quantize(x) if config.payload == "fp8" else (x, None)


def received(rank: int, config: EPConfig, tokens: Sequence[SentTokens], alignment: int = 1) -> Rows:
    """Rows by local slot, each slot's first at a multiple of the alignment, in it entries in order. Gaps are 0."""
    local = config.num_slots // len(tokens)
    slots = torch.cat([sent.slot_idx_TK.flatten().long() for sent in tokens])
    lengths = [sent.slot_idx_TK.numel() for sent in tokens]
    source = torch.repeat_interleave(torch.arange(len(tokens)), torch.tensor(lengths)).to(slots.device)
    token = torch.cat([torch.arange(n, device=slots.device) // config.top_k for n in lengths])
    order = torch.where(slots >= 0, slots, config.num_slots).argsort(stable=True)
    order = order[(slots[order] >= 0) & (slots[order] // local == rank)]
    slot = slots[order] - rank * local
    count = torch.bincount(slot, minlength=local)
    room = -(-count // alignment) * alignment
    begin, before = room.cumsum(0) - room, count.cumsum(0) - count
    row = begin[slot] + torch.arange(len(order), device=slots.device) - before[slot]
    values = torch.cat([sent.x_TH for sent in tokens])
    base = torch.tensor([0, *(sent.x_TH.shape[0] for sent in tokens)]).cumsum(0).to(slots.device)
    x, scale = payload(config, values[base[source[order]] + token[order]])
    num_rows = int(room.sum())
    return Rows(
        _spread(x, row, num_rows),
        None if scale is None else _spread(scale, row, num_rows),
        count.int(),
        row,
        source[order],
        token[order],
        slot,
    )


def _spread(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    out = torch.zeros(num_rows, *values.shape[1:], dtype=values.dtype, device=values.device)
    if out.dtype == torch.float8_e4m3fn:
        out.view(torch.uint8)[row] = values.view(torch.uint8)
    else:
        out[row] = values
    return out


def expert_output(config: EPConfig, rank: int, x: Tensor, scale: Tensor | None, slot: Tensor) -> Tensor:
    """The same function of a row as tests.ranks.cases_ep.expert_output; slot: local slot of each row."""
    values = x.float() if scale is None else reference.dequantize(x, scale)
    return (values * (1.5 + 0.25 * slot[:, None]) + rank * 0.1).to(config.dtype)


def outputs(rank: int, config: EPConfig, rows: Rows) -> Tensor:
    """y_RH of a rank for what it received."""
    slot = torch.zeros(rows.num_rows, dtype=torch.long, device=rows.x.device)
    slot[rows.row] = rows.slot
    return expert_output(config, rank, rows.x, rows.scale, slot)


def combined(rank: int, config: EPConfig, tokens: Sequence[SentTokens]) -> Tensor:
    """y_TH of a rank when all ranks' experts give `outputs`. exact_combine: the fp32 sum over k; else each rank sums
    its outputs in fp32 and rounds, and the owner sums those."""
    mine, local = tokens[rank], config.num_slots // len(tokens)
    x, scale = payload(config, mine.x_TH)
    slots = mine.slot_idx_TK.long()

    def weighted(k: int, holder: Tensor) -> Tensor:
        slot = slots[:, k].clamp_min(0)
        values = x.float() if scale is None else reference.dequantize(x, scale)
        output = (values * (1.5 + 0.25 * (slot % local)[:, None]) + (holder * 0.1)[:, None]).to(config.dtype)
        return mine.topk_weights_TK[:, k, None] * output.float()

    zero = torch.zeros_like(mine.x_TH, dtype=torch.float32)
    y = zero
    if config.exact_combine:
        for k in range(config.top_k):
            y = torch.where(slots[:, k, None] >= 0, y + weighted(k, slots[:, k].clamp_min(0) // local), y)
        return y.to(config.dtype)
    for holder in range(len(tokens)):
        share, any_row = zero, torch.zeros_like(slots[:, 0], dtype=torch.bool)
        for k in range(config.top_k):
            here = (slots[:, k] >= 0) & (slots[:, k] // local == holder)
            share = torch.where(here[:, None], share + weighted(k, torch.full_like(slots[:, k], holder)), share)
            any_row |= here
        y = torch.where(any_row[:, None], y + share.to(config.dtype).float(), y)
    return y.to(config.dtype)
