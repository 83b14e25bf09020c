"""Ranks over a wire, for benchmarks: starts them here, and names one that died or hung, with the wait that it ended.

Each is `python -m MODULE '{"groups": ..., "rank": ..., ...}'` (wire_rank.py), without MPI. Knows nothing of what they
measure.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eprt import env
from eprt.ep.wire.meeting import listen_for_ranks


@dataclass(frozen=True)
class WireRanks:
    """One program's ranks, in groups over each of several wires."""

    module: str
    nodes: int
    per_node: int
    wires: Sequence[str]  # a group over each
    timeout_s: float = 30.0  # after which a rank that does not answer has hung
    patience_s: float = 60.0  # after one rank's error, until the others must have ended too
    limit_s: float = 900.0  # for all of it
    meeting: str | None = None  # HOST:PORT where ranks of several hosts meet; None: all are of this host
    here: range | None = None  # those of this host; None: all

    def run(self, case: Mapping[str, Any]) -> list[dict[str, Any]] | str:
        """What the ranks say, all the same; or in one line which rank was lost or hung, and in which wait."""
        size = self.nodes * self.per_node
        listeners = [listen_for_ranks("127.0.0.1", 0) for _ in self.wires if self.meeting is None]
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in listeners] or [self.meeting]
        variables = {**env.without_mpi(), "EPRT_TIMEOUT_S": f"{self.timeout_s:g}"}
        if self.meeting is None:
            variables["EPRT_RANKS_PER_NODE"] = str(self.per_node)
        processes = {}
        for rank in self.here or range(size):
            fds = [one.fileno() for one in listeners if rank == 0]
            groups = list(zip(addresses, self.wires, fds or [None] * len(self.wires)))
            given = json.dumps({"groups": groups, "rank": rank, "size": size, **case})
            processes[rank] = subprocess.Popen(
                [sys.executable, "-m", self.module, given],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=fds,
            )
        for listener in listeners:
            listener.close()
        return self._collect(processes)

    def _collect(self, processes: Mapping[int, subprocess.Popen]) -> list[dict[str, Any]] | str:
        deadline_s, has_failed = time.monotonic() + self.limit_s, False
        try:
            while any(one.poll() is None for one in processes.values()) and time.monotonic() < deadline_s:
                if not has_failed and any(one.poll() for one in processes.values()):
                    deadline_s, has_failed = min(deadline_s, time.monotonic() + self.patience_s), True
                time.sleep(0.05)
            hung = [rank for rank, one in processes.items() if one.poll() is None]
            said = {rank: _last_words(rank, one) for rank, one in processes.items() if rank not in hung}
        finally:
            for one in processes.values():
                one.kill()
                one.wait()
        if hung or any("error" in one for one in said.values()):
            return describe_loss(said, hung)
        return next(iter(said.values()))["cases"]


def _last_words(rank: int, ended: subprocess.Popen) -> dict[str, Any]:
    output, errors = ended.communicate()
    if output.startswith("{"):
        return json.loads(output)
    last = errors.strip().splitlines()[-1:] or [""]
    how = f"killed by signal {-ended.returncode}" if ended.returncode < 0 else last[0]
    return {"error": f"rank {rank} ended: {how}", "rank": rank}


def describe_loss(said: dict[int, dict], hung: list[int]) -> str:
    """Which rank it was, and the wait of another that it ended. said: by rank, of those that have ended."""
    errors = [one for one in said.values() if "error" in one]
    ended = [one for one in errors if "rank" in one]
    waiting = [one for one in errors if "peer" in one]
    # Who was waited for, and itself waited for nobody: the others wait behind it.
    culprits = [one for one in waiting if one["peer"] in hung or "peer" not in said.get(one["peer"], {})]
    told = (culprits or waiting or errors)[0]["error"] if errors else ""
    if ended:
        return f"{ended[0]['error']}; {told}" if told != ended[0]["error"] else told
    if hung:
        names = ", ".join(map(str, hung))
        return f"rank {names} hung: {told or 'no rank told what it waited for'}"
    return told
