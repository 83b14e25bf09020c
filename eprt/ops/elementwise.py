"""Row-wise operators: RMSNorm, SiLU-and-multiply, rotary embedding. They compute in fp32 and return the input's dtype.

Inputs are float32 or bfloat16 and may be strided views whose last dimension is contiguous; results are contiguous. Each
row is computed alone: its bits depend neither on the other rows nor on the number of threads.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.ops import native

_DTYPES = (torch.float32, torch.bfloat16)


def _checked_rows(name: str, x: Tensor, ndim: int) -> Tensor:
    """x with its last dimension contiguous; ValueError unless it is float32 or bfloat16 of ndim dimensions."""
    if x.dim() != ndim:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, must have {ndim} dimensions")
    if x.dtype not in _DTYPES:
        raise ValueError(f"{name} is {x.dtype}, must be torch.float32 or torch.bfloat16")
    return x if x.stride(-1) == 1 else x.contiguous()


def checked_norm_weight(weight_H: Tensor, size: int) -> Tensor:
    if weight_H.shape != (size,):
        raise ValueError(f"weight has shape {tuple(weight_H.shape)}, must be [{size}] like the rows")
    return _checked_rows("weight", weight_H, 1)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, per row."""
    x = _checked_rows("x", x_TH, 2)
    out_TH = x.new_empty(x.shape)
    native.load().rms_norm(x, checked_norm_weight(weight_H, x.shape[1]), eps, out_TH, torch.get_num_threads())
    return out_TH


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual). The sum is rounded to x's dtype before the norm, as two operators do."""
    x, residual = _checked_rows("x", x_TH, 2), _checked_rows("residual", residual_TH, 2)
    if not (x.shape == residual.shape and x.dtype == residual.dtype):
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}, residual {residual.dtype} {tuple(residual.shape)}: must be the same"
        )
    out_TH, sum_TH = x.new_empty(x.shape), x.new_empty(x.shape)
    weight = checked_norm_weight(weight_H, x.shape[1])
    native.load().add_rms_norm(x, residual, weight, eps, out_TH, sum_TH, torch.get_num_threads())
    return out_TH, sum_TH


def silu_mul(x_TI2: Tensor, limit: float | None = None) -> Tensor:
    """[T, 2I] (gate, then up) -> silu(gate) * up, [T, I]. limit: gate is cut to at most this, up to -limit..limit."""
    x = _checked_rows("x", x_TI2, 2)
    if x.shape[1] % 2 != 0:
        raise ValueError(f"x has {x.shape[1]} columns, must be even: gate, then up")
    out_TI = x.new_empty(x.shape[0], x.shape[1] // 2)
    native.load().silu_mul(x, out_TI, math.inf if limit is None else limit, torch.get_num_threads())
    return out_TI


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding of each row's position."""

    cos_sin_PR: Tensor  # fp32 [positions, R], cos then sin, each R/2
    position_T: Tensor  # int64 or int32, rows of that table
    # Whether pairs are (2i, 2i+1), DeepSeek's layout, or (i, i + R/2), Llama's, for checkpoints with rope_interleave
    # false. Interleaved results keep that order, as the complex product in transformers' DeepSeek V2 does. With
    # rope_interleave, transformers' V3 stores the even results in the lower half and the odd ones in the upper half:
    # the same numbers, permuted. Queries and keys are permuted alike, so their products agree.
    interleaved: bool

    def checked(self, num_rows: int, size: int) -> tuple[Tensor, Tensor]:
        """The table and the positions as kernels read them. ValueError unless they fit so many rows of this size."""
        table, position = self.cos_sin_PR, self.position_T
        if size % 2 != 0:
            raise ValueError(f"x has {size} rotary dimensions, must be even")
        if not (table.dtype == torch.float32 and table.dim() == 2 and table.shape[1] == size):
            raise ValueError(
                f"cos_sin is {table.dtype} {tuple(table.shape)}, must be torch.float32 [positions, {size}]"
            )
        if not (position.shape == (num_rows,) and position.dtype in (torch.int64, torch.int32)):
            raise ValueError(f"position is {position.dtype} {tuple(position.shape)}, must be torch.int64 [{num_rows}]")
        return table.contiguous(), position.to(torch.int64).contiguous()

    def outside(self, row: int) -> ValueError:
        """What to raise where a row's position is not in the table."""
        position = int(self.position_T[row])
        return ValueError(f"position[{row}] = {position} is outside the {self.cos_sin_PR.shape[0]} of cos_sin")


def rope(x_TNR: Tensor, rotation: Rotation) -> Tensor:
    """Rotates pairs of the last dimension. ValueError for a position outside the table."""
    x = _checked_rows("x", x_TNR, 3)
    table, position = rotation.checked(x.shape[0], x.shape[2])
    out_TNR = x.new_empty(x.shape)
    bad = native.load().rope(x, table, position, rotation.interleaved, out_TNR, torch.get_num_threads())
    if bad >= 0:
        raise rotation.outside(bad)
    return out_TNR
