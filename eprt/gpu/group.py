"""RankGroup: what this package asks of the ranks that work together.

A Protocol: eprt.gpu does not know eprt.ep, whose EPGroup has these members.
"""

from typing import Any, Protocol


class RankGroup(Protocol):
    """The ranks of a job, seen from one of them."""

    rank: int  # this one: 0..size - 1
    size: int  # ranks of the job

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        ...

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Collective."""
        ...

    def barrier(self) -> None: ...

    def lost_ranks(self) -> tuple[int, ...]:
        """Ranks that have died."""
        ...
