"""Messages between the launcher of host 0 and those of the other hosts, over one connection to each.

    host k    HostCard, once both ends have proved the key     then StopAsked, RankEnded
    host 0    TurnedAway, or Begin when all hosts have come    then Serving; Ended is the last

Knows nothing of sockets (link.py).
"""

import msgspec


class _HostMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class HostCard(_HostMessage, frozen=True):
    """What a host was given, and has: all that must fit before anything is loaded."""

    node: int  # --node-rank
    name: str  # of the host
    nnodes: int
    num_ranks: int  # of this host
    model: str  # fingerprint of its directory
    memory: str  # equal for hosts that are one machine (process_domain)
    flags: dict[str, str]  # those that must be equal, and variables; of secrets a digest
    secrets: frozenset[str] = frozenset()  # names among them

    def __str__(self) -> str:
        return f"host {self.node} ({self.name})"


class StopAsked(_HostMessage, frozen=True):
    """A signal has come: the server is to drain, at the second one without waiting."""


class RankEnded(_HostMessage, frozen=True):
    rank: int
    pid: int
    status: int  # exit status, negative for a signal


class TurnedAway(_HostMessage, frozen=True):
    """This host does not fit, or the others have not come."""

    reason: str


class Begin(_HostMessage, frozen=True):
    """All hosts have come: ranks may start."""

    nonce: bytes  # of this run; with the group's key it gives the run's secrets
    meeting_port: int  # of rank 0's WireGroup, at host 0's address
    frontend_port: int  # where the frontend takes ranks, likewise


class Serving(_HostMessage, frozen=True):
    """All ranks have loaded."""


class Ended(_HostMessage, frozen=True):
    status: int  # exit status of the server
    reason: str  # in words; "" where it was told to stop


ToFirstHost = HostCard | StopAsked | RankEnded
ToOtherHost = TurnedAway | Begin | Serving | Ended
