"""ElasticMemory: SymmetricMemory among ranks that may be lost and return as other processes.

Every rank's copy has addresses of its own in every process for ever, whoever lies there: what kernels and CUDA graphs
have been told stays right. A rank that takes no part has nothing there, and whatever it held is free.
"""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from eprt.gpu.driver import CudaError
from eprt.gpu.group import FdExchange
from eprt.gpu.shared_allocation import AddressRange, SharedAllocation
from eprt.gpu.symmetric import SymmetricMemory


class ElasticMemory(SymmetricMemory):
    """As SymmetricMemory, in a group whose ranks give each other descriptors (RankGroup.fd_desk)."""

    def _find_desk(self) -> FdExchange:
        desk = self.group.fd_desk()
        assert desk is not None
        return desk

    def _range_of(self, rank: int) -> AddressRange:
        """New, for the rank's copy."""
        return AddressRange(self._device.index, self.num_bytes)

    def _allocate(self) -> Any:
        self._held: dict[int, Any] = {}  # by other rank: the ticket of its copy that is mapped here
        self._ranges: dict[int, AddressRange] = {}  # of the other ranks
        self._desk = desk = self._find_desk()
        addresses = self._range_of(self.group.rank)
        self._allocation = SharedAllocation(self._device.index, self.num_bytes, addresses)
        self._own = self._allocation.address
        self._ticket = desk.offer(self._allocation.take_fd())
        return self._ticket

    def _map(self, handles: list[Any]) -> list[int]:
        """A rank that joins maps whoever lives: who that will be when it enters, it does not know yet."""
        self._ticket_of = self.group.lasting_allgather(self._ticket)
        for rank in range(self.group.size):
            if rank != self.group.rank:
                self._ranges[rank] = self._range_of(rank)
                with contextlib.suppress(CudaError) if self.group.joins else contextlib.nullcontext():
                    self._map_copy(rank, self._ticket_of(rank))
        return [self._ranges[rank].address if rank in self._ranges else self._own for rank in range(self.group.size)]

    def remap(self, alive: Sequence[bool]) -> None:
        for rank, addresses in self._ranges.items():
            ticket = self._ticket_of(rank) if alive[rank] else None
            if ticket != self._held.get(rank):
                addresses.unmap()
                self._held[rank] = None
                if ticket is not None:
                    self._map_copy(rank, ticket)

    def _map_copy(self, rank: int, ticket: Any) -> None:
        try:
            fd = self._desk.fetch(ticket)
            try:
                self._ranges[rank].map_shared(fd)
            finally:
                os.close(fd)
        except (CudaError, OSError) as error:
            raise CudaError(f"{self._where} cannot map rank {rank}'s GPU memory: {error}") from None
        self._held[rank] = ticket

    def _unmap(self) -> None:
        for addresses in self._ranges.values():
            addresses.close()
        self._ranges.clear()

    def _free(self) -> None:
        self._desk.withdraw(self._ticket)
        self._allocation.close()
