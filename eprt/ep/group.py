"""EPGroup: who takes part, which rank lives on which node, and the few collectives that set-up needs.

Knows nothing of tokens or experts. The hot path uses only windows and point-to-point messages made here.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np


class EPGroup(ABC):
    """A fixed set of ranks. Build it with from_mpi, from_torch or single.

    rank, size: this process and how many there are.
    node_of_rank: node index of each rank, numbered from 0 in order of first appearance; EPRT_RANKS_PER_NODE overrides
    it (virtual nodes).
    local_ranks: global ranks on this node, in order.
    """

    rank: int
    size: int
    node_of_rank: tuple[int, ...]

    @property
    def node(self) -> int:
        return self.node_of_rank[self.rank]

    @property
    def num_nodes(self) -> int:
        return max(self.node_of_rank) + 1

    @property
    def local_ranks(self) -> tuple[int, ...]:
        return tuple(r for r in range(self.size) if self.node_of_rank[r] == self.node)

    @staticmethod
    def from_mpi(comm: Any = None) -> "EPGroup":
        """Ranks of an mpi4py communicator (default: COMM_WORLD)."""
        from eprt.ep.group_mpi import MpiGroup

        return MpiGroup(comm)

    @staticmethod
    def from_torch(process_group: Any = None) -> "EPGroup":
        """Ranks of a torch.distributed process group (default: the world); no MPI needed."""
        from eprt.ep.group_torch import TorchGroup

        return TorchGroup(process_group)

    @staticmethod
    def single() -> "EPGroup":
        """One rank, this process."""
        return SingleGroup()

    # -- set-up collectives (all ranks call them in the same order) --

    @abstractmethod
    def allgather(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order."""

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def shared_window(self, num_bytes: int) -> list[np.ndarray]:
        """Symmetric memory inside the node: each local rank contributes num_bytes (zeroed, 64-byte aligned);
        returns one uint8 view per local rank, in local_ranks order. Freed by close()."""

    # -- point to point between nodes: bytes, tagged, never blocking the caller --

    @abstractmethod
    def isend(self, buffer: np.ndarray, peer: int, tag: int) -> Any:
        """Starts sending; returns an object with test() -> bool. The buffer must stay untouched until it is done."""

    @abstractmethod
    def irecv(self, buffer: np.ndarray, peer: int, tag: int) -> Any:
        """Starts receiving into buffer; returns an object with test() -> bool and num_bytes once done."""

    @abstractmethod
    def close(self) -> None:
        """Frees windows. Collective."""


class SingleGroup(EPGroup):
    """The group of one."""

    def __init__(self):
        self.rank, self.size, self.node_of_rank = 0, 1, (0,)

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        pass

    def shared_window(self, num_bytes: int) -> list[np.ndarray]:
        # numpy aligns to 16 bytes only; over-allocate and cut to a cache line.
        raw = np.zeros(num_bytes + 64, dtype=np.uint8)
        start = -raw.ctypes.data % 64
        return [raw[start : start + num_bytes]]

    def isend(self, buffer: np.ndarray, peer: int, tag: int) -> Any:
        raise ValueError(f"[rank 0/1] a group of one has no peer {peer} to send to")

    def irecv(self, buffer: np.ndarray, peer: int, tag: int) -> Any:
        raise ValueError(f"[rank 0/1] a group of one has no peer {peer} to receive from")

    def close(self) -> None:
        pass
