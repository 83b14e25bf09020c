"""A norm and the rotation of a row's last values in one operator (DeepSeek-V4's queries, keys, entries and outputs).

T rows of N heads of D values. Each row is computed alone: its bits depend neither on the other rows nor on the number
of threads. Knows nothing of what the rows are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.ops import native
from eprt.ops.elementwise import Rotation

_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class RowNorm:
    """x / sqrt(mean(x^2) + eps) * weight over a row's values, rounded to x's dtype."""

    eps: float
    weight_D: Tensor | None = None  # float32 or bfloat16; None: 1


def turn_rows(
    x_TND: Tensor,
    rotation: Rotation,
    norm: RowNorm | None = None,
    backwards: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The rows, normalised if there is a norm, with as many of the last values rotated as the table has.

    x: float32 or bfloat16, each head's values contiguous. rotation: interleaved. backwards: by the negative angles.
    dtype: of the result, default x's. ValueError when shapes or dtypes do not fit, or a position is not in the table.
    """
    table_PR, position_T = rotation.cos_sin_PR, rotation.position_T
    dtype = dtype or x_TND.dtype
    _check(
        x_TND.dim() == 3 and x_TND.dtype in _DTYPES and dtype in _DTYPES and x_TND.stride(2) == 1,
        f"x is {x_TND.dtype} {tuple(x_TND.shape)}, must be [T, N, D] of torch.float32 or torch.bfloat16",
    )
    T, N, D = x_TND.shape
    _check(rotation.interleaved, "pairs must be interleaved")
    _check(
        table_PR.dtype == torch.float32 and table_PR.dim() == 2 and table_PR.is_contiguous(),
        f"cos_sin is {table_PR.dtype} {tuple(table_PR.shape)}, must be contiguous torch.float32 [positions, R]",
    )
    R = table_PR.shape[1]
    _check(R % 2 == 0 and R <= D, f"{R} of {D} values to be rotated: must be even and no more than there are")
    _check(
        position_T.shape == (T,) and position_T.dtype == torch.int64 and position_T.is_contiguous(),
        f"position is {position_T.dtype} {tuple(position_T.shape)}, must be contiguous torch.int64 [{T}]",
    )
    weight_D = None if norm is None else norm.weight_D
    if weight_D is not None:
        right = weight_D.shape == (D,) and weight_D.dtype in _DTYPES and weight_D.is_contiguous()
        _check(right, f"weight is {weight_D.dtype} {tuple(weight_D.shape)}, must be [{D}] like the rows")
    out_TND = torch.empty(T, N, D, dtype=dtype)
    rule = norm is not None, weight_D, 0.0 if norm is None else norm.eps
    threads = torch.get_num_threads()
    bad = native.load().turned_rows(x_TND, *rule, table_PR, position_T, backwards, out_TND, threads)
    if bad >= 0:
        raise ValueError(f"position[{bad}] = {position_T[bad].item()} is outside the {len(table_PR)} of cos_sin")
    return out_TND


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
