"""Rows copied between tensors on CPUs, chosen by number on both sides; pages of either may lie apart.

Knows nothing of what rows mean.
"""

import torch
from torch import Tensor

from eprt.ops import native


def copy_rows(to: Tensor, to_row_Y: Tensor | None, source: Tensor, source_row_Y: Tensor | None) -> None:
    """Row source_row[i] of the source becomes row to_row[i]; where one of both is negative nothing is copied.

    to, source: of one dtype; [X, ..], or [P, S, ..] whose rows are numbered page * S + place. Each row is contiguous.
    to_row_Y, source_row_Y: int64; None for 0, 1, 2, ... (one of them at most).
    ValueError when shapes or dtypes do not fit, or a row is behind the last; nothing is copied then.
    """
    to_PSX, source_PSX = _pages(to), _pages(source)
    if to_PSX.dtype != source_PSX.dtype or to_PSX.shape[2] != source_PSX.shape[2]:
        raise ValueError(
            f"rows of {source_PSX.shape[2]} values of {source.dtype} do not become rows of {to_PSX.shape[2]} values of "
            f"{to.dtype}"
        )
    rows = [row_Y for row_Y in (to_row_Y, source_row_Y) if row_Y is not None]
    if not rows or any(row.shape != rows[0].shape or row.dtype != torch.int64 or row.dim() != 1 for row in rows):
        raise ValueError(f"rows are {[(row.dtype, tuple(row.shape)) for row in rows]}, must be torch.int64 [Y], alike")
    count = len(rows[0])
    to_row_Y, source_row_Y = (None if row is None else row.contiguous() for row in (to_row_Y, source_row_Y))
    bad = native.load().copy_paged_rows(to_PSX, to_row_Y, source_PSX, source_row_Y, count)
    if bad >= 0:
        where, taken = (bad if row is None else int(row[bad]) for row in (to_row_Y, source_row_Y))
        have = [x.shape[0] * x.shape[1] for x in (source_PSX, to_PSX)]
        raise ValueError(f"row {taken} of {have[0]} to row {where} of {have[1]}: one of them is not there")


def _pages(rows: Tensor) -> Tensor:
    """[P, S, X], a view."""
    paged = rows.unsqueeze(1) if rows.dim() == 2 else rows
    if paged.dim() != 3 or paged.stride(2) != 1:
        raise ValueError(f"rows of shape {tuple(rows.shape)}: must be [X, D] or [P, S, D], each row contiguous")
    return paged
