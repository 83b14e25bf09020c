"""AdjacentGpuMemory: every rank's copy in one row of addresses, so that one tensor has all of them.

The row begins with this rank's own copy, which is always there; those of the other ranks follow, the next rank's first.
So a tensor's address is that of memory also where others are lost. Knows nothing of what lies there.
"""

from typing import Any

import torch
from torch import Tensor

from eprt.gpu.elastic_memory import ElasticMemory
from eprt.gpu.group import FdExchange, RankGroup
from eprt.gpu.shared_allocation import AddressRange


class AdjacentGpuMemory(ElasticMemory):
    """As ElasticMemory.

    num_bytes: of a copy, a multiple of shared_allocation.granularity().
    desk: over which ranks give each other their memory, where the group has none because none can be replaced.
    """

    def __init__(self, group: RankGroup, num_bytes: int, desk: FdExchange | None = None):
        self._given_desk, self._row = desk, None
        super().__init__(group, num_bytes)

    def place_of(self, rank: int) -> int:
        """Which copy of the row is the rank's: 0 for this rank's own."""
        return (rank - self.group.rank) % self.group.size

    def row(self, dtype: torch.dtype) -> Tensor:
        """All copies. Not to be used after close()."""
        num_bytes = self.group.size * self.num_bytes
        storage: Any = torch._C._construct_storage_from_data_pointer(self._own, self._device, num_bytes)
        length = num_bytes // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=self._device).set_(storage, 0, (length,), (1,))

    def _find_desk(self) -> FdExchange:
        return self._given_desk or super()._find_desk()

    def _range_of(self, rank: int) -> AddressRange:
        if self._row is None:
            self._row = AddressRange(self._device.index, self.group.size * self.num_bytes)
        return AddressRange(self._device.index, self.num_bytes, self._row, self.place_of(rank) * self.num_bytes)

    def close(self) -> None:
        super().close()
        if self._row is not None:
            self._row.close()
            self._row = None
