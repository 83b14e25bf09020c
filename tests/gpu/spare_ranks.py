"""Spare ranks: processes that import what a case needs while another case runs, and then wait for theirs.

A process needs seconds to import torch and the cases. So whenever a case takes its ranks, as many are started for the
next one. A spare rank does not touch the GPU before it has its case: cases measure who is late. Knows no case.
"""

import subprocess
import sys
from pathlib import Path

from eprt import env

ROOT = Path(__file__).resolve().parents[2]


def start(rank: int, module: str, *job: str, under: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A process that imports the module and then waits for a line with its job.

    job: what it should do at once instead of waiting.
    under: a program, with its options, that starts the process.
    """
    return subprocess.Popen(
        [*under, sys.executable, "-m", "tests.gpu.launch", str(rank), module, *job],
        cwd=ROOT,
        env=env.without_mpi(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class SpareRanks:
    """The processes that wait, at most one for each rank."""

    def __init__(self) -> None:
        self._waiting: dict[int, subprocess.Popen[str]] = {}

    def take_ranks(self, num_ranks: int, module: str) -> list[subprocess.Popen[str]]:
        """Processes of ranks 0 to num_ranks - 1; starts as many for the next case, often one of the same module."""
        ranks = [self._take_rank(rank, module) for rank in range(num_ranks)]
        self._waiting |= {rank: start(rank, module) for rank in range(num_ranks)}
        return ranks

    def _take_rank(self, rank: int, module: str) -> subprocess.Popen[str]:
        spare = self._waiting.pop(rank, None)
        if spare is not None and spare.poll() is None:
            return spare
        if spare is not None:
            spare.communicate()
        return start(rank, module)

    def stop_all(self) -> None:
        for spare in self._waiting.values():
            spare.kill()
            spare.communicate()
        self._waiting.clear()


SPARES = SpareRanks()
