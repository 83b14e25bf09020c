"""RankGroup: what this package asks of the ranks that work together.

A Protocol: eprt.gpu does not know eprt.ep, whose EPGroup has these members.
"""

from collections.abc import Callable
from typing import Any, Protocol


class RankGroup(Protocol):
    """The ranks of a job, seen from one of them."""

    rank: int  # this one: 0..size - 1
    size: int  # ranks of the job
    gpus: tuple[str, ...]  # UUID of each rank's GPU; empty: ranks of a host take its GPUs in turn
    joins: bool  # whether this process takes a lost rank's place while the others work

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        ...

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Collective."""
        ...

    def lasting_allgather(self, value: Any) -> Callable[[int], Any]:
        """As allgather: tells a rank's value, later that of the process that is the rank by then."""
        ...

    def fd_desk(self) -> "FdExchange | None":
        """Where ranks that may be replaced give each other descriptors; None: no rank can be replaced."""
        ...

    def barrier(self) -> None: ...

    def lost_ranks(self) -> tuple[int, ...]:
        """Ranks that have died."""
        ...


class FdExchange(Protocol):
    """Open files of the ranks of this host, for each other."""

    def offer(self, fd: int) -> Any:
        """A ticket by which others get the file. The descriptor is no longer the caller's."""
        ...

    def withdraw(self, ticket: Any) -> None: ...

    def fetch(self, ticket: Any) -> int:
        """A descriptor of the file, the caller's."""
        ...
