"""Counts choices of experts: one program per piece of the batch. Sums of integers do not depend on their order."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit(do_not_specialize=["num_choices", "num_decode_choices"])
def _count_choices(tokens, kept, chosen, phase_stride, num_choices, num_decode_choices, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_choices
    expert = tl.load(chosen + at, mask=inside, other=-1)
    tl.store(kept + at, expert.to(tl.int32), mask=inside)
    phase = (at < num_decode_choices).to(tl.int64)
    tl.atomic_add(tokens + phase * phase_stride + expert, 1, mask=expert >= 0, sem="relaxed")


def count_choices(expert_idx_TK: Tensor, tokens_PE: Tensor, kept_TK: Tensor, num_decode: int) -> None:
    """As eprt.ops.choices.count_choices; nothing waits for the GPU. kept_TK: contiguous."""
    if num_choices := expert_idx_TK.numel():
        _count_choices[(triton.cdiv(num_choices, _BLOCK),)](
            tokens_PE,
            kept_TK,
            expert_idx_TK.contiguous(),
            tokens_PE.stride(0),
            num_choices,
            num_decode * expert_idx_TK.shape[1],
            BLOCK=_BLOCK,
        )
