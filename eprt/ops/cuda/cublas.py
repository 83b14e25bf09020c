"""cuBLAS's product of block-scaled e4m3 matrices: many rows. 1 x 128 blocks of activations, 128 x 128 of weights."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from eprt.ops.weight import BLOCK, Weight

PADDED_TO = 16  # rows
_FIRST_CUDA = (12, 9)


def takes(w: Weight, out_dtype: torch.dtype) -> bool:
    """Hopper, from CUDA 12.9 on: builds of torch for an older one have the call and refuse it. w: one matrix or a
    stack."""
    n, k = w.shape[-2:]
    if w.data.dtype != torch.float8_e4m3fn or not w.data.is_cuda or not hasattr(F, "scaled_mm"):
        return False
    if _cuda_of(torch.version.cuda) < _FIRST_CUDA:
        return False
    fits = k % (4 * BLOCK) == 0 and n % 16 == 0 and out_dtype == torch.bfloat16
    return fits and torch.cuda.get_device_capability(w.data.device) == (9, 0)


@functools.cache
def _cuda_of(version: str | None) -> tuple[int, ...]:
    return tuple(map(int, (version or "0").split(".")[:2]))


def scaled_mm(x_PK: Tensor, scale_PG: Tensor, w_NK: Weight) -> Tensor:
    """bfloat16 [P, N]. P: a multiple of PADDED_TO; the rows' scales lie column by column."""
    assert w_NK.scale is not None
    per_row, per_block, plain = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128, F.SwizzleType.NO_SWIZZLE
    return F.scaled_mm(
        x_PK, w_NK.data.T, [scale_PG], [per_row], [w_NK.scale.T], [per_block], [plain], [plain], None, torch.bfloat16
    )
