"""RankSlots: the processes of one host's ranks: started, signalled, reaped, and started again where one was lost.

Knows nothing of the frontend, nor of what the ranks do.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from eprt.ep.group.host_board import HostBoard
from eprt.ep.group.liveness import PeerWatch
from eprt.serve.options import RankConfig
from eprt.serve.ranks.processes import start_rank

# Seconds until the first restart of a rank; doubled with each further one, as far as the second number.
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 60.0


class RankProcess(Protocol):
    """A child's Popen, or an AdoptedProcess."""

    pid: int

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        ...

    def send_signal(self, sig: int) -> None: ...


class AdoptedProcess:
    """A rank that another shell has started. Its status is 0 by the time that it has ended: nobody can ask for it."""

    def __init__(self, pid: int):
        self.pid = pid
        self._watch = PeerWatch({0: pid})

    def poll(self) -> int | None:
        if not self._watch.lost():
            return None
        self._watch.close()
        return 0

    def send_signal(self, sig: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, sig)


@dataclass(frozen=True)
class RankEnd:
    """A process that has ended."""

    rank: int
    pid: int
    status: int  # exit status, negative for a signal
    instance: str = ""  # that the rank was part of, where the server has several
    host: str = ""  # likewise

    def __str__(self) -> str:
        how = f": killed by signal {-self.status}" if self.status < 0 else ""
        how = f": exit status {self.status}" if self.status > 0 else how
        where = f"{self.instance}, " if self.instance else ""
        host = f", host {self.host}" if self.host else ""
        return f"{where}rank {self.rank} (pid {self.pid}{host}) ended{how}"


class RankSlots:
    """The processes by rank.

    Args:
        config: of the ranks; only rank and what says whether they join differ between them.
        board: that they share; None: they meet over a wire.
        ranks: those of this host; default: all.
        fingerprint: of the model that they have loaded; asked for when one joins.
    """

    def __init__(
        self,
        config: RankConfig,
        board: HostBoard | None,
        ranks: Sequence[int] | None = None,
        fingerprint: Callable[[], str] = str,
    ):
        self._config, self._board, self._fingerprint = config, board, fingerprint
        self._ranks = range(config.num_ranks) if ranks is None else ranks
        self._processes: dict[int, RankProcess] = {}
        self._started_s: dict[int, float] = {}
        self._delay_s: dict[int, float] = {}
        self._due_s: dict[int, float] = {}  # when lost ranks are started again

    @property
    def pid_of_rank(self) -> dict[int, int]:
        """Of the ranks that run."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def config_of(self, rank: int, *, joins: bool) -> RankConfig:
        known = self._fingerprint() if joins else ""
        return msgspec.structs.replace(self._config, rank=rank, joins=joins, fingerprint=known)

    @property
    def num_running(self) -> int:
        return len(self._processes)

    def start_all(self) -> None:
        """The ranks of the start."""
        for rank in self._ranks:
            self.start(rank)

    def start(self, rank: int, *, joins: bool = False) -> None:
        """Starts a rank's process."""
        self.add_process(rank, start_rank(self.config_of(rank, joins=joins)))

    def add_process(self, rank: int, process: RankProcess) -> None:
        """From now on the process is this rank."""
        self._mark_ended(rank, False)
        self._processes[rank], self._started_s[rank] = process, time.monotonic()
        self._due_s.pop(rank, None)

    def reap(self) -> list[RankEnd]:
        """The processes that have ended since the last call."""
        ends = []
        for rank, process in list(self._processes.items()):
            if (status := process.poll()) is not None:
                del self._processes[rank]
                self._mark_ended(rank, True)
                ends.append(RankEnd(rank, process.pid, status))
        return ends

    def _mark_ended(self, rank: int, ended: bool) -> None:
        if self._board is not None:
            self._board.mark_ended(rank, ended)

    def plan_restart(self, end: RankEnd) -> float:
        """Lets restart_due start the rank again after a delay, which is returned. It grows with each loss of the slot,
        until a process there has lasted for the longest delay."""
        rank, lasted_s = end.rank, time.monotonic() - self._started_s[end.rank]
        self._delay_s[rank] = delay_s = next_delay_s(self._delay_s.get(rank, 0.0), lasted_s)
        self._due_s[rank] = time.monotonic() + delay_s
        return delay_s

    def restart_due(self) -> None:
        for rank, due_s in list(self._due_s.items()):
            if time.monotonic() >= due_s:
                self.start(rank, joins=True)

    def send_signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            process.send_signal(number)


def next_delay_s(latest_s: float, lasted_s: float) -> float:
    """Until the next restart. latest_s: until the one before, 0 for none. lasted_s: how long the process was there."""
    return min(max(2 * (0.0 if lasted_s > LONGEST_DELAY_S else latest_s), FIRST_DELAY_S), LONGEST_DELAY_S)
