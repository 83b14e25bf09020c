"""Tiles of rows that lie group after group, where only the GPU knows how many rows each group has."""

import triton
import triton.language as tl


@triton.jit
def find_tile(tile, count, group, TILE: tl.constexpr):
    """(group, first row of the group, its rows, first row of the tile within the group) of the tile'th tile.

    count: int32 vector of rows per group, 0 past the last group.
    group: the vector 0, 1, 2, ...
    Each group is cut into tiles of TILE rows. Past the last tile, group is the vector's length and has no rows.
    """
    tiles = (count + TILE - 1) // TILE
    end = tl.cumsum(tiles, 0)
    which = tl.sum((end <= tile).to(tl.int32), 0)
    mine = group == which
    begin = tl.sum(tl.where(mine, tl.cumsum(count, 0) - count, 0), 0)
    rows = tl.sum(tl.where(mine, count, 0), 0)
    first = (tile - tl.sum(tl.where(mine, end - tiles, 0), 0)) * TILE
    return which, begin, rows, first


@triton.jit
def num_tiles(count, TILE: tl.constexpr):
    return tl.sum((count + TILE - 1) // TILE, 0)
