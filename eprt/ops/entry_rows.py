"""Rows on their way into the cache (DeepSeek-V4): normalised, rotated, encoded and put into pages.

On CPUs the separate operators, one after the other. Knows nothing of who owns pages.
"""

import torch
from torch import Tensor

from eprt.ops.elementwise import Rotation
from eprt.ops.entry_format import EntryFormat
from eprt.ops.index_format import IndexFormat
from eprt.ops.indexer import as_cached
from eprt.ops.paged_rows import copy_rows
from eprt.ops.turned_rows import RowNorm, turn_rows


def insert_rows(
    pages_PEW: Tensor, slot_X: Tensor, x_XD: Tensor, entry: EntryFormat, rotation: Rotation, norm: RowNorm | None = None
) -> None:
    """Row i of turn_rows(x) becomes, as entries are stored, row slot[i] of the pages; where that is negative, nothing.

    pages: as of copy_rows, [P, E, entry.width]. slot_X: int64, page * E + place. ValueError as the operators have it.
    """
    rows_XD = turn_rows(x_XD.unsqueeze(1), rotation, norm).squeeze(1)
    copy_rows(pages_PEW, slot_X, entry.encode(rows_XD), None)


def insert_keys(
    pages_PEW: Tensor, slot_X: Tensor, x_XD: Tensor, index: IndexFormat, rotation: Rotation, norm: RowNorm | None = None
) -> None:
    """As insert_rows, of the indexer's keys: transformed, where the format says so, before they are encoded."""
    rows_X1D = as_cached(turn_rows(x_XD.unsqueeze(1), rotation, norm), index.dtype)
    copy_rows(pages_PEW, slot_X, index.encode(rows_X1D.squeeze(1)), None)


def turned_queries(query_XND: Tensor, rotation: Rotation, cache_dtype: torch.dtype) -> Tensor:
    """The indexer's queries, as index_topk takes them: the last values of each head rotated by neighbours; transformed
    where the cache has fp8 or fp4 keys (torch.uint8)."""
    return as_cached(turn_rows(query_XND, rotation), cache_dtype)
