"""Row-wise operators: RMSNorm, SiLU-and-multiply, rotary embedding. fp32 inside, the input's dtype outside."""

from torch import Tensor

from eprt.ops import reference


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, per row of the last dimension. Rows may be strided."""
    return reference.rms_norm(x_TH, weight_H, eps)


def silu_mul(x_TI2: Tensor) -> Tensor:
    """[T, 2I] (gate, then up) -> silu(gate) * up, [T, I]."""
    return reference.silu_mul(x_TI2)


def rope_interleaved(x_TNR: Tensor, cos_sin_PR: Tensor, position_T: Tensor) -> Tensor:
    """Rotates pairs (2i, 2i+1) of the last dimension. cos_sin_PR: fp32 [positions, R], cos then sin, each R/2."""
    return reference.rope_interleaved(x_TNR, cos_sin_PR, position_T)
