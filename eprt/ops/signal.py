"""TileSignal: how a running product announces which tiles of its result are stored. Knows nothing of who waits."""

from typing import Protocol

from torch import Tensor


class TileSignal(Protocol):
    """Counters of stored columns, one per tile of block_m rows of an expert's result. The EP layer's Signal is one.

    Each stored piece of a tile adds the number of its columns (release, GPU scope). When a counter has reached H, the
    width of the result, the tile's rows may be read: H is the threshold to wait for, whatever the tiling.
    """

    @property
    def counter(self) -> Tensor:
        """int32 [experts * slot_tiles] on the GPU, by expert * slot_tiles + tile; zeroed by the caller."""
        ...

    @property
    def block_m(self) -> int:
        """Rows of a tile: 16, 32, 64 or 128."""
        ...

    @property
    def slot_tiles(self) -> int:
        """Tiles of an expert, at most."""
        ...
