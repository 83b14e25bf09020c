"""Ranks that tell each other of moments, beside what they wait in: so that a late one is the last, and waited for, also
on the most crowded machine."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from eprt.ep.group.group import EPGroup

PATIENCE_S = 100.0


class Moments:
    """Of all ranks of one host, also of several virtual nodes. Made and closed by all of them together."""

    def __init__(self, group: EPGroup):
        self.group = group
        self._folder = Path(group.allgather(tempfile.mkdtemp(prefix="eprt-test-") if group.rank == 0 else "")[0])

    def tell(self, name: str) -> None:
        (self._folder / f"{name}-{self.group.rank}").touch()

    def wait(self, name: str, ranks: Iterable[int]) -> None:
        """Until these ranks have told of it."""
        left, deadline_s = set(ranks), time.monotonic() + PATIENCE_S
        while left := {rank for rank in left if not (self._folder / f"{name}-{rank}").exists()}:
            assert time.monotonic() < deadline_s, f"nothing of {name} in {PATIENCE_S:g} s from the ranks {left}"
            time.sleep(0.002)

    @contextmanager
    def told_in_a_wait(self, name: str) -> Iterator[None]:
        """This rank tells of it when a wait for others has taken longer than a slice (eprt/ep/group/wait.py)."""
        lost_ranks = self.group.lost_ranks

        def tell_and_look() -> tuple[int, ...]:
            self.tell(name)
            return lost_ranks()

        with patch.object(self.group, "lost_ranks", tell_and_look):
            yield

    def close_apart(self, lost: int | None = None) -> None:
        """Without the group, which may be broken. All but the lost one; none of them ends before all have come here,
        since its end would be a loss as well."""
        first, *others = sorted(set(range(self.group.size)) - {lost})
        self.tell("closes")
        self.wait("closes", [first, *others])
        if self.group.rank == first:
            self.wait("has closed", others)
            shutil.rmtree(self._folder)
        else:
            self.tell("has closed")

    def close(self) -> None:
        self.group.barrier()
        if self.group.rank == 0:
            shutil.rmtree(self._folder)


class Clock:
    """Stands still until a condition holds, then goes on by 0.15 s with each look: for a deadline of 0.2 s, after which
    what is waited for has been looked at once more."""

    def __init__(self, condition: Callable[[], bool]):
        self._condition, self._now_s = condition, 0.0

    def monotonic(self) -> float:
        self._now_s += 0.15 * self._condition()
        return self._now_s
