"""What a product tells while it computes: which tiles of its result are there."""

from typing import Protocol

from torch import Tensor


class TileSignal(Protocol):
    """Counters of finished columns, one for each block_m rows of an expert's result; the EP layer's Signal is one.

    counter: int32 [experts * slot_tiles] on the GPU, element expert * slot_tiles + tile, zeroed by the caller. Each
    stored piece of a tile adds the number of its columns (release, GPU scope): at H, the width of the result, the
    tile's rows may be read. That is the threshold to wait for, whatever the tiling. block_m: 16, 32, 64 or 128.
    """

    @property
    def counter(self) -> Tensor: ...
    @property
    def block_m(self) -> int: ...
    @property
    def slot_tiles(self) -> int: ...
