"""cuBLAS's product of block-scaled e4m3 matrices, for many rows: a scale per 1 x 128 activations and 128 x 128 weights.

Knows when cuBLAS can compute a product, not when it is the fastest way.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from eprt.ops.weight import BLOCK, Weight

PADDED_TO = 16  # the number of rows is a multiple of this
_FIRST_CUDA = (12, 9)


def can_multiply(w: Weight, out_dtype: torch.dtype) -> bool:
    """Whether cuBLAS computes products with w, one matrix or a stack: on Hopper, from CUDA 12.9 on.

    Builds of torch for an older CUDA have the call and refuse it.
    """
    n, k = w.shape[-2:]
    if w.data.dtype != torch.float8_e4m3fn or not w.data.is_cuda or _cuda_of(torch.version.cuda) < _FIRST_CUDA:
        return False
    fits = k % (4 * BLOCK) == 0 and n % 16 == 0 and out_dtype == torch.bfloat16
    return fits and torch.cuda.get_device_capability(w.data.device) == (9, 0)


@functools.cache
def _cuda_of(version: str | None) -> tuple[int, ...]:
    """(major, minor) of torch.version.cuda."""
    return tuple(map(int, (version or "0").split(".")[:2]))


def scaled_mm(x_PK: Tensor, scale_PG: Tensor, w_NK: Weight) -> Tensor:
    """bfloat16 [P, N]. P is a multiple of PADDED_TO; scale_PG is stored column by column."""
    assert w_NK.scale is not None
    per_row, per_block, plain = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128, F.SwizzleType.NO_SWIZZLE
    return F.scaled_mm(
        x_PK, w_NK.data.T, [scale_PG], [per_row], [w_NK.scale.T], [per_block], [plain], [plain], None, torch.bfloat16
    )
