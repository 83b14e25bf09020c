"""View: which ranks of a group take part, numbered. Ranks keep their numbers; a view says which of them exchange.

Plain data: knows no processes and decides nothing.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class View:
    """All ranks of a view have the same one; what they exchange is only right while they have."""

    number: int  # grows with every change
    alive: tuple[bool, ...]  # by rank: whether it takes part

    @staticmethod
    def full(num_ranks: int) -> "View":
        """All ranks, as at the start of a job."""
        return View(0, (True,) * num_ranks)

    @staticmethod
    def alone(rank: int, num_ranks: int) -> "View":
        """One rank that gets ready while others work without it."""
        return View(0, tuple(other == rank for other in range(num_ranks)))

    def without(self, rank: int) -> "View":
        """The next view after the loss of a rank."""
        return View(self.number + 1, tuple(alive and r != rank for r, alive in enumerate(self.alive)))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that take part, in order."""
        return tuple(rank for rank, alive in enumerate(self.alive) if alive)

    @property
    def is_full(self) -> bool:
        return all(self.alive)
