"""RankBarrier: some ranks of a node wait for each other, through flags in a shared window. Knows nothing of why."""

from collections.abc import Sequence
from time import perf_counter_ns

import numpy as np
import torch

from eprt import env
from eprt.ep.group.group import EPGroup
from eprt.ep.group.wait import Waiter
from eprt.ops import native

_LINE = 64


class RankBarrier:
    """Construction and close() are collective over the group, whose ranks are of one node; each rank has one barrier.

    ranks: that wait for each other, this one among them; those that take no part in the view are not waited for.
    phase: what errors call the wait.
    timeout_s: deadline of every wait; default EPRT_TIMEOUT_S.
    """

    def __init__(self, group: EPGroup, ranks: Sequence[int], phase: str, timeout_s: float | None = None):
        self._group, self._ranks, self._phase = group, tuple(ranks), phase
        self._waiter = Waiter(group, env.get("EPRT_TIMEOUT_S") if timeout_s is None else timeout_s)
        self._ops = native.load()
        self._window = group.shared_window(_LINE)
        own: np.ndarray = self._window.segments[group.local_ranks.index(group.rank)]
        own[:] = 0
        self._flag_of = {rank: at.ctypes.data for rank, at in zip(group.local_ranks, self._window.segments)}
        self._epoch = self._waited_ns = 0
        self._follow_view()
        group.barrier()

    def _follow_view(self) -> None:
        self._awaited = tuple(rank for rank in self._ranks if self._group.view.alive[rank])
        self._flags = torch.tensor([self._flag_of[rank] for rank in self._awaited])

    @property
    def epoch(self) -> int:
        """Of the latest wait, also where it failed."""
        return self._epoch

    def wait(self) -> None:
        """Until all of the ranks have come as often as this one. What each wrote before is there for all behind it.

        Raises EPTimeoutError or RankLostError, and what group.interrupt raises.
        """
        self._epoch += 1
        self._ops.ep_publish(self._flag_of[self._group.rank], self._epoch)
        arguments = (self._flags, self._epoch, self._waiter.owns_core, self._waiter.slice_ns)
        began_ns = perf_counter_ns()
        self._waiter.for_call(self._ops.ep_wait, arguments, self._seen, self._epoch, self._phase)
        self._waited_ns += perf_counter_ns() - began_ns

    @property
    def waited_us(self) -> float:
        """In waits that ended well, since the start."""
        return self._waited_ns / 1e3

    def _seen(self, index: int) -> tuple[int, int]:
        return self._awaited[index], self._ops.ep_flag_epoch(self._flags[index].item())

    def restart(self, epoch: int) -> None:
        """From now on those of the ranks that take part in group.view wait; their next wait has this epoch, larger than
        any before."""
        self._epoch = epoch - 1
        self._follow_view()

    def close(self) -> None:
        """Frees the window. Collective while all ranks live; never hangs when some do not."""
        self._window.close()
