"""Hangs: which rank holds the others up, from where each of them stands. Knows no windows and no clocks.

A rank that waits for another is not to blame as long as that one does not wait itself; so the chain is followed to its
end. A rank whose heartbeat is missing stands nowhere: what it waited for before counts for nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..log.standing import PROCESS_STATES, LoggedProcess, Standing

MISSED_S = 2.0  # without a heartbeat: four of them
_STANDS_STILL = ("stopped", "traced", "ended")


@dataclass(frozen=True)
class Culprit:
    """Who does not move, and who waits for it."""

    ranks: tuple[int, ...]  # one, or several that wait for each other in a circle
    waiters: tuple[int, ...]  # that wait for it, directly or through others, in order; of a circle its own ranks
    first: int | None  # the waiter that has waited longest; None: nobody waits
    waited_s: float  # for how long
    call: str  # in which call

    @property
    def rank(self) -> int:
        """The first of the ranks."""
        return self.ranks[0]

    @property
    def is_circle(self) -> bool:
        return len(self.ranks) > 1


def find_culprits(standings: Mapping[int, Standing]) -> list[Culprit]:
    """The ranks at the end of all chains of waits, in order, and those without a heartbeat."""
    edges = {
        rank: stood.waits_for
        for rank, stood in standings.items()
        if not is_missing(stood) and stood.waits_for is not None and stood.waits_for != rank
    }
    held: dict[tuple[int, ...], list[int]] = {(rank,): [] for rank, stood in standings.items() if is_missing(stood)}
    for rank in sorted(edges):
        held.setdefault(_end_of_chain(rank, edges), []).append(rank)
    return [_culprit(ranks, waiters, standings) for ranks, waiters in sorted(held.items())]


def is_missing(stood: Standing) -> bool:
    """Whether the rank gives no heartbeat, or its process stands still."""
    return stood.heard_s >= MISSED_S or stood.state in _STANDS_STILL


def _end_of_chain(rank: int, edges: Mapping[int, int]) -> tuple[int, ...]:
    """The rank that waits for nobody, or the circle."""
    path = [rank]
    while path[-1] in edges:
        following = edges[path[-1]]
        if following in path:
            return tuple(sorted(path[path.index(following) :]))
        path.append(following)
    return (path[-1],)


def _culprit(ranks: tuple[int, ...], waiters: list[int], standings: Mapping[int, Standing]) -> Culprit:
    if not waiters:
        return Culprit(ranks, (), None, 0.0, "")
    first = max(waiters, key=lambda rank: standings[rank].waited_s)
    return Culprit(ranks, tuple(waiters), first, standings[first].waited_s, standings[first].call)


# ---- in words -------------------------------------------------------------------------------------------------------

_STATES = {
    "stopped": "its process is stopped by a signal (state T)",
    "traced": "its process is held by a debugger (state t)",
    "disk": "its process waits for a disk or a file system (state D)",
    "ended": "its process has ended",
    "computes": "its process computes, but has made no call since",
    "asleep": "it waits for requests and takes no part in the step of the others",
    "steps": "its process is alive, uses no core and waits for no rank",
}


def hang_cause(culprit: Culprit, standings: Mapping[int, Standing]) -> str:
    """comp: it computes; stopped: its process stands still; unknown."""
    if culprit.is_circle:
        return "unknown"
    stood = standings.get(culprit.rank)
    if stood is None:
        return "unknown"
    return "stopped" if stood.state in ("stopped", "traced") else "comp" if stood.state == "computes" else "unknown"


def hang_evidence(culprit: Culprit, standings: Mapping[int, Standing]) -> str:
    if culprit.is_circle:
        names = " -> ".join(f"rank {rank}" for rank in (*culprit.ranks, culprit.ranks[0]))
        return f"these ranks wait for each other in a circle ({names}) for {culprit.waited_s:.1f} s in {culprit.call}"
    who, stood = f"rank {culprit.rank}", standings.get(culprit.rank, Standing(0.0))
    text = (
        f"{who} has given no heartbeat for {stood.heard_s:.1f} s"
        if stood.heard_s >= MISSED_S
        else who + " does not go on"
    )
    if stood.heard_s < MISSED_S or stood.state in PROCESS_STATES:
        text += f": {_STATES.get(stood.state, stood.state)}"
    if culprit.first is None:
        return text + "; no other rank waits for it yet"
    lasts = f"for {culprit.waited_s:.1f} s in {culprit.call}"
    if len(culprit.waiters) == 1:
        return f"{text}; rank {culprit.first} waits for it {lasts}"
    return f"{text}; ranks {', '.join(map(str, culprit.waiters))} wait for it, rank {culprit.first} {lasts}"


def hang_advice(culprit: Culprit, standings: Mapping[int, Standing], processes: Mapping[int, LoggedProcess]) -> str:
    if culprit.is_circle:
        return "messages between these ranks are lost: look at the network between their hosts"
    rank = culprit.rank
    process, stood = processes.get(rank), standings.get(rank)
    state = "steps" if stood is None else stood.state
    pid, where = ("PID", "its host") if process is None else (process.pid, process.host)
    if state == "stopped":
        return f"on {where}: kill -CONT {pid} lets it go on; find out who stopped it"
    if state == "traced":
        return f"on {where}: detach the debugger from process {pid}"
    if state == "disk":
        return f"on {where}: look at the file system that process {pid} reads (dmesg, /proc/{pid}/stack)"
    if state == "computes":
        return f"on {where}: py-spy dump --pid {pid} shows what it computes; a long prompt may end by itself"
    return f"on {where}: see whether process {pid} lives and what it does (ps, py-spy dump --pid {pid}, dmesg)"
