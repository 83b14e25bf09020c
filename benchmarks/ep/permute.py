"""What a user of DeepEP's normal mode adds around it: received rows into groups by expert, and their outputs back.

As inference engines do it: one Triton kernel reads each received row once and writes it, with its scales, to all its
experts' groups; on the way back a row's outputs are summed with the gate's weights. Rows of a group are in no fixed
order. All SMs take part. Knows nothing of DeepEP itself.

R received rows, one per (token, source rank); K choices of a token; E experts of this rank; G rows in groups.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.cuda import sum_rows

_FEW_WORDS = 2048  # of 4 bytes: a row of e4m3


class GroupedRows(NamedTuple):
    """Received rows by expert, as a grouped product takes them."""

    x_GH: Tensor
    scale_GC: Tensor | None  # fp32, one per 128 columns of an fp8 row
    count_E: Tensor  # int32, on the GPU
    position_RK: Tensor  # int64, where each choice's row is in x_GH; -1 for experts of other ranks


@triton.jit
def _group_rows(
    out,
    out_scale,
    position_RK,
    next_E,
    x,
    scale,
    idx_RK,
    num_words,
    num_scales,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    WORDS: tl.constexpr,
    SCALES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    choice, word, column = tl.arange(0, CHOICES), tl.arange(0, WORDS), tl.arange(0, SCALES)
    value = tl.load(x + row * num_words + word, mask=word < num_words)  # under way while places are taken
    if scale is not None:
        factor = tl.load(scale + row * num_scales + column, mask=column < num_scales)
    expert = tl.load(idx_RK + row * K + choice, mask=choice < K, other=-1)
    position = tl.atomic_add(next_E + expert, 1, mask=expert >= 0, sem="relaxed")
    position = tl.where(expert >= 0, position, -1)
    tl.store(position_RK + row * K + choice, position.to(tl.int64), mask=choice < K)
    for k in tl.static_range(K):
        to = tl.sum(tl.where(choice == k, position, 0)).to(tl.int64)
        if to >= 0:
            tl.store(out + to * num_words + word, value, mask=word < num_words)
            if scale is not None:
                tl.store(out_scale + to * num_scales + column, factor, mask=column < num_scales)


def group_rows(x_RH: Tensor, scale_RC: Tensor | None, idx_RK: Tensor, counts: Sequence[int]) -> GroupedRows:
    """Launches and does not wait.

    x_RH: bf16 or e4m3, contiguous.
    idx_RK: int64, experts of this rank, -1 for others.
    counts: rows of each expert, which the host knows from the dispatch.
    """
    (rows, hidden), top_k = x_RH.shape, idx_RK.shape[1]
    told = torch.tensor([counts, list(accumulate(counts, initial=0))[:-1]], dtype=torch.int32)
    on_gpu = x_RH.is_cuda
    count_E, next_E = (told.pin_memory() if on_gpu else told).to(x_RH.device, non_blocking=True)
    x_GH = x_RH.new_empty(sum(counts), hidden)
    scale_GC = None if scale_RC is None else scale_RC.new_empty(len(x_GH), scale_RC.shape[1])
    position_RK = torch.empty_like(idx_RK)
    if rows:
        words, num_scales = x_RH.view(torch.int32), 0 if scale_RC is None else scale_RC.shape[1]
        _group_rows[(rows,)](
            x_GH.view(torch.int32),
            scale_GC,
            position_RK,
            next_E,
            words,
            scale_RC,
            idx_RK,
            words.shape[1],
            num_scales,
            K=top_k,
            CHOICES=triton.next_power_of_2(top_k),
            WORDS=triton.next_power_of_2(words.shape[1]),
            SCALES=triton.next_power_of_2(max(1, num_scales)),
            num_warps=8 if words.shape[1] > _FEW_WORDS else 4,
        )
    return GroupedRows(x_GH, scale_GC, count_E, position_RK)


def ungroup_rows(y_GH: Tensor, rows: GroupedRows, weight_RK: Tensor) -> Tensor:
    """[R, H]: of each received row its experts' outputs times the gate's weights, summed in fp32."""
    return sum_rows(y_GH, rows.position_RK, weight_RK)
