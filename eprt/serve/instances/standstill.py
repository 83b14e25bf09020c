"""Standstill: ranks that neither end nor go on. Their instance is lost, and they must not go on later.

A process of this host that was stopped (SIGSTOP) is seen in its state; one of another host by its silence; one that
hangs in a step is told by those that wait for it. Knows nothing of what becomes of the requests.
"""

import time
from collections.abc import Sequence

from eprt.serve.instances.instance import Instance
from eprt.serve.ranks.rank import Rank

_STOPPED_LOOKS = 6  # that must find a process stopped
_SILENCE_S = 20.0  # of heartbeats, which come twice a second


class Standstill:
    """Of one server."""

    def __init__(self):
        self._stopped_looks: dict[int, int] = {}  # by pid: how many looks in a row have found it stopped

    def look(self, instances: Sequence[Instance]) -> None:
        """To be called now and then."""
        for instance in instances:
            for rank, evidence in instance.pool.elasticity.hung_ranks():
                rank.kill()
                instance.pool.lose(rank, "hangs, and is killed", evidence)
            for rank in instance.pool.members:
                if rank.is_far:
                    if rank.info is not None and time.monotonic() - rank.beat_s > _SILENCE_S:
                        instance.pool.lose(rank, f"was not heard of for {_SILENCE_S:g} s, and is given up")
                    continue
                looks = self._stopped_looks.pop(rank.pid, 0) + 1 if rank.is_stopped else 0
                if looks >= _STOPPED_LOOKS:
                    rank.kill()
                    instance.pool.lose(rank, "was stopped, and is killed")
                elif looks:
                    self._stopped_looks[rank.pid] = looks

    def forget(self, rank: Rank) -> None:
        self._stopped_looks.pop(rank.pid, None)
