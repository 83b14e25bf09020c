"""MLP: the dense SwiGLU block of the leading layers, and the shared expert."""

from copy import copy

import torch
from torch import Tensor

from eprt import ops
from eprt.layers.linear import Linear, Matrix, moved_weight, swiglu_weights


class MLP:
    """y = (silu(x Wg^T) * (x Wu^T)) Wd^T, with gate and up stored as one matrix. limit: as MoEConfig.swiglu_limit."""

    def __init__(
        self,
        gate_IH: Matrix,
        up_IH: Matrix,
        down_HI: Matrix,
        weight_format: str,
        dtype: torch.dtype,
        limit: float | None = None,
    ):
        self.limit = limit
        w13, w2 = swiglu_weights(gate_IH, up_IH, down_HI, weight_format, dtype)
        self.gate_up, self.down = Linear(w13), Linear(w2)

    def moved_to(self, dtype: torch.dtype, device: torch.device) -> "MLP":
        """The same on another device or in another dtype; quantised weights stay as they are."""
        moved = copy(self)
        moved.gate_up, moved.down = (
            Linear(moved_weight(linear.weight, dtype, device)) for linear in (self.gate_up, self.down)
        )
        return moved

    def __call__(self, x_TH: Tensor) -> Tensor:
        bound = () if self.limit is None else (self.limit,)
        return ops.silu_linear(self.gate_up(x_TH), self.down.weight, *bound)
