"""EPGroup: who takes part, which rank lives on which node, and the few collectives that set-up needs.

Knows nothing of tokens or experts. The hot path uses only windows and point-to-point messages made here.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from pkgutil import resolve_name
from typing import Any, Protocol

import numpy as np

from eprt import env
from eprt.ep.errors import EPTimeoutError
from eprt.ep.group.alone import load_mpi
from eprt.ep.group.current_wait import CurrentWait
from eprt.ep.group.liveness import LossOrder, PeerWatch, process_domain
from eprt.ep.group.memfd import adjacent_memfd
from eprt.ep.group.view import View
from eprt.ep.group.window import PAGE, AdjacentMemory, SharedWindow, private_window
from eprt.fd_desk import FdDesk

MAX_END_S = 60.0  # until a process that was killed has ended
MAX_CLOSE_S = 5.0  # a rank that fails closes alone; nobody comes to meet it

# Imported when they are asked for: a program without MPI never imports mpi4py.
_GROUPS = {
    "mpi": "eprt.ep.group.mpi_group:MpiGroup",
    "torch": "eprt.ep.group.torch_group:TorchGroup",
    "host": "eprt.ep.group.host_group:HostGroup",
}


def nodes_of_hosts(host_of_rank: Sequence[Any], ranks_per_node: int | None) -> tuple[int, ...]:
    """Node of each rank, numbered from 0 in order of first appearance.

    One node per host, or, with ranks_per_node, nodes of so many neighbouring ranks of a host (the last may be smaller).
    """
    num_seen: dict[Any, int] = {}
    node_of: dict[Any, int] = {}
    nodes = []
    for host in host_of_rank:
        index = num_seen.get(host, 0)
        num_seen[host] = index + 1
        key = (host, index // ranks_per_node if ranks_per_node else 0)
        nodes.append(node_of.setdefault(key, len(node_of)))
    return tuple(nodes)


class PendingMessage(Protocol):
    """What isend and irecv return: a message under way."""

    def test(self) -> bool:
        """Whether the message is done; never blocks. Raises ConnectionError when it can no longer finish."""
        ...

    def cancel(self) -> None:
        """Gives up a receive: its buffer will not be written any more."""
        ...


class EPGroup(ABC):
    """A fixed set of ranks; the view says who takes part. Build it with from_mpi, from_torch, from_host or single."""

    rank: int  # of this process
    size: int
    node_of_rank: tuple[int, ...]  # numbered from 0 in order of first appearance; EPRT_RANKS_PER_NODE splits hosts
    num_ranks_on_host: int  # all virtual nodes together
    view: View  # whose ranks exchange; those that take part change it together, while nothing is under way
    # Whether this process takes the place of a rank that is gone, while the others work: its view is then itself alone,
    # and set-up calls wait for nobody.
    joins: bool = False
    gpus: tuple[
        str, ...
    ] = ()  # UUID of each rank's GPU, where somebody has chosen them; else ranks of a host take turns
    # The wait of this process's main thread that lasts now; None: it is in none. Others read it at any time.
    current_wait: CurrentWait | None = None
    # Called every few milliseconds in every wait, to end it by raising ViewChangedError; None: nobody ends waits.
    interrupt: Callable[[], None] | None = None
    # Whether a wait fails only for a rank whose own data are missing, and not as soon as any rank has died: then all
    # ranks of a node fail in the same call, for the same rank (layers/moe.py).
    fails_in_order: bool = False

    def _join(self, rank: int, size: int) -> None:
        """Finds the hosts and nodes of all ranks. Collective; subclasses call it once allgather works."""
        self.rank, self.size = rank, size
        self.view = View.alone(rank, size) if self.joins else View.full(size)
        self._num_channels = 0
        ranks_per_node = env.get("EPRT_RANKS_PER_NODE")
        peers = self.allgather((process_domain(), os.getpid(), ranks_per_node))
        if len({peer[2] for peer in peers}) > 1:
            raise ValueError(
                f"[rank {rank}/{size}] EPRT_RANKS_PER_NODE differs between ranks: {[peer[2] for peer in peers]}; "
                "export it to all of them (mpirun -x EPRT_RANKS_PER_NODE)"
            )
        domains = [peer[0] for peer in peers]
        self.node_of_rank = nodes_of_hosts(domains, ranks_per_node)
        same_host = [r for r in range(size) if domains[r] == domains[rank]]
        self.num_ranks_on_host = len(same_host)
        self._watch = PeerWatch({r: peers[r][1] for r in same_host if r != rank})

    @cached_property
    def shared(self) -> dict[Any, Any]:
        """What several users of the group have in common, by a key of theirs."""
        return {}

    @cached_property
    def _losses(self) -> LossOrder:
        return LossOrder()

    @property
    def node(self) -> int:
        return self.node_of_rank[self.rank]

    @property
    def num_nodes(self) -> int:
        return max(self.node_of_rank) + 1

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Global ranks on this node, in order."""
        return self.ranks_of_node(self.node)

    def ranks_of_node(self, node: int) -> tuple[int, ...]:
        return tuple(r for r in range(self.size) if self.node_of_rank[r] == node)

    def lost_ranks(self) -> tuple[int, ...]:
        """Ranks of the view, on this host, whose process has ended, in the order in which that was noticed: one that
        ends because of another is not the first. Those of other hosts are known by silence alone."""
        return self._losses.in_order({rank for rank in self._watch.lost() if self.view.alive[rank]})

    def watch(self, rank: int, pid: int) -> None:
        """From now on the rank is this process of this host; nothing changes where it is already."""
        if rank != self.rank:
            self._watch.watch(rank, pid)

    def wait_ended(self, ranks: Sequence[int]) -> None:
        """Until the processes of these ranks, of this host, have ended, and with them what they had on GPUs.

        EPTimeoutError past MAX_END_S: a process that the kernel cannot end.
        """
        start_s = time.monotonic()
        while still := set(ranks).difference(self._watch.lost()):
            waited_s = time.monotonic() - start_s
            if waited_s > MAX_END_S:
                raise EPTimeoutError(self.rank, self.size, min(still), "the end of its process", 0, 1, waited_s)
            time.sleep(5e-4)

    def new_channel(self) -> int:
        """A message tag nobody else in the group uses. All ranks ask in the same order."""
        self._num_channels += 1
        return self._num_channels

    @staticmethod
    def from_mpi(comm: Any = None) -> "EPGroup":
        """Ranks of an mpi4py communicator (default: COMM_WORLD)."""
        load_mpi()
        return resolve_name(_GROUPS["mpi"])(comm)

    @staticmethod
    def from_torch(process_group: Any = None) -> "EPGroup":
        """Ranks of a torch.distributed process group (default: the world); no MPI needed."""
        return resolve_name(_GROUPS["torch"])(process_group)

    @staticmethod
    def from_host(board: Any, rank: int, *, joins: bool = False, elastic: bool = False) -> "EPGroup":
        """Ranks of one host, started by eprt's launcher with a HostBoard. joins: in the place of one that has ended.
        elastic: ranks may be lost and replaced."""
        return resolve_name(_GROUPS["host"])(board, rank, joins=joins, elastic=elastic)

    @staticmethod
    def single() -> "EPGroup":
        """One rank, this process."""
        return SingleGroup()

    # -- set-up collectives (all ranks call them in the same order) --

    @abstractmethod
    def allgather(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order."""

    def lasting_allgather(self, value: Any) -> Callable[[int], Any]:
        """As allgather: tells a rank's value, later that of the process that is the rank by then."""
        return self.allgather(value).__getitem__

    def fd_desk(self) -> FdDesk | None:
        """Where ranks that may be replaced give each other descriptors; None: no rank can be replaced."""
        return None

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def shared_window(self, num_bytes: int) -> SharedWindow:
        """Symmetric memory inside the node: each local rank contributes num_bytes of its own choice."""

    def lasting_window(self, num_bytes: int) -> SharedWindow:
        """A shared window of which a process that takes a lost rank's place finds its segment as it was left."""
        return self.shared_window(num_bytes)

    def adjacent_memory(self, num_bytes: int) -> AdjacentMemory:
        """num_bytes (a multiple of 4096, equal on all ranks) of each rank, in a row. The ranks are of one node."""
        where = f"[rank {self.rank}/{self.size}]"
        if self.num_nodes > 1:
            raise ValueError(f"{where} the ranks of {self.num_nodes} nodes have no memory in a row")
        if num_bytes % PAGE:
            raise ValueError(f"{where} {num_bytes} bytes of adjacent memory: must be a multiple of {PAGE}")
        sizes = self.allgather(num_bytes)
        if set(sizes) - {None} != {num_bytes}:
            raise ValueError(f"{where} {num_bytes} bytes of adjacent memory here, {sizes} on all ranks: must be equal")
        return self._adjacent_memory(num_bytes)

    def _adjacent_memory(self, num_bytes: int) -> AdjacentMemory:
        return adjacent_memfd(num_bytes, self.rank, self.size, self.allgather)

    # -- point to point between nodes: bytes, never blocking the caller; equal (peer, tag) arrive in order --

    @abstractmethod
    def isend(self, buffer: np.ndarray, peer: int, tag: int) -> PendingMessage:
        """Starts sending. The buffer must stay untouched until test() returns True."""

    @abstractmethod
    def irecv(self, buffer: np.ndarray, peer: int, tag: int) -> PendingMessage:
        """Starts receiving into buffer, which may be longer than the message."""

    @abstractmethod
    def close(self) -> None:
        """Frees windows and connections. Collective while all ranks live; never hangs when some do not."""


class SingleGroup(EPGroup):
    """The group of one."""

    def __init__(self):
        self._join(0, 1)

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        pass

    def shared_window(self, num_bytes: int) -> SharedWindow:
        return private_window(num_bytes)

    def isend(self, buffer: np.ndarray, peer: int, tag: int) -> PendingMessage:
        raise ValueError(f"[rank 0/1] a group of one has no peer {peer} to send to")

    def irecv(self, buffer: np.ndarray, peer: int, tag: int) -> PendingMessage:
        raise ValueError(f"[rank 0/1] a group of one has no peer {peer} to receive from")

    def close(self) -> None:
        self._watch.close()
