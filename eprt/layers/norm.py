"""RMSNorm over the last dimension."""

from torch import Tensor

from eprt import ops


class RMSNorm:
    def __init__(self, weight_H: Tensor, eps: float):
        self.weight_H = weight_H
        self.eps = eps

    def __call__(self, x_TH: Tensor) -> Tensor:
        return ops.rms_norm(x_TH, self.weight_H, self.eps)

    def add(self, x_TH: Tensor, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum)."""
        return ops.add_rms_norm(x_TH, residual_TH, self.weight_H, self.eps)
