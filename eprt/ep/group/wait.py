"""How a rank waits for others: asleep in bounded slices, with a deadline, looking now and then whether they live.

A slice is one native call without the GIL. Between slices Python runs signal handlers, so Ctrl-C and SIGTERM work.
"""

import math
import os
import time
from collections.abc import Callable

from eprt.ep.errors import CONFIGURED_DEADLINE, EPError, EPTimeoutError, RankLostError
from eprt.ep.group.current_wait import CurrentWait
from eprt.ep.group.group import EPGroup, PendingMessage

_SLICE_NS = 20_000_000
_INTERRUPTED_SLICE_NS = 5_000_000


class Waiter:
    """Waits of one rank.

    timeout_s: deadline of each wait unless the call gives another (math.inf for none).
    deadline: what sets it, for errors.
    """

    def __init__(self, group: EPGroup, timeout_s: float):
        self.group = group
        self.timeout_s, self.deadline = timeout_s, CONFIGURED_DEADLINE
        # Decides how the first microseconds of a wait are spent (csrc/cpu/ep_flag.cpp).
        self.owns_core = group.num_ranks_on_host <= (os.cpu_count() or 1)

    @property
    def slice_ns(self) -> int:
        """Length of a slice: how late a wait may hear of an interruption."""
        return _SLICE_NS if self.group.interrupt is None else _INTERRUPTED_SLICE_NS

    def for_call(
        self,
        wait_slice: Callable[..., int],
        arguments: tuple,
        describe: Callable[[int], tuple[int, int]],
        epoch: int,
        phase: str,
        timeout_s: float | None = None,
    ) -> None:
        """Until wait_slice(*arguments), which waits at most slice_ns, returns a negative number.

        Otherwise it returns what it still waits for; describe tells its rank and the epoch seen. Raises RankLostError
        when a rank of this host has died, EPTimeoutError at the deadline, and what group.interrupt raises.
        """
        index = wait_slice(*arguments)
        if index < 0:
            return
        group, start = self.group, time.monotonic()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            while True:
                group.current_wait = CurrentWait(describe(index)[0], phase, start)
                if group.interrupt is not None:
                    group.interrupt()
                lost = group.lost_ranks()
                if lost and not group.fails_in_order:
                    raise RankLostError(group.rank, group.size, lost[0], phase, lost[1:])
                index = wait_slice(*arguments)
                if index < 0:
                    return
                # It had died before this slice: nothing more will come.
                if lost and (peer := describe(index)[0]) in lost:
                    raise RankLostError(group.rank, group.size, peer, phase)
                waited_s = time.monotonic() - start
                if waited_s > limit_s and not math.isinf(limit_s):
                    peer, seen = describe(index)
                    deadline = self.deadline if timeout_s is None else CONFIGURED_DEADLINE
                    where = group.rank, group.size, peer, phase
                    raise EPTimeoutError(*where, seen, epoch, waited_s, deadline=deadline)
        finally:
            group.current_wait = None

    def for_messages(
        self,
        messages: dict[int, PendingMessage],
        epoch: int,
        phase: str,
        on_arrival: Callable[[int], None] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Until every message (key: peer rank) is done; calls on_arrival(peer) for each, as they come."""
        if not messages:
            return
        left = dict(messages)
        idle_s = 0.0

        def poll() -> int:
            nonlocal idle_s
            end = time.monotonic() + self.slice_ns * 1e-9
            while left and time.monotonic() < end:
                arrived = [peer for peer, message in left.items() if self._test(peer, message, phase)]
                for peer in arrived:
                    del left[peer]
                    if on_arrival is not None:
                        on_arrival(peer)
                # Yield at first, then sleep longer and longer: MPI makes progress only inside test().
                idle_s = 0.0 if arrived else min(idle_s + 2e-6, 1e-3)
                if left:
                    time.sleep(idle_s if idle_s > 4e-5 else 0)
            return 0 if left else -1

        self.for_call(poll, (), lambda _: (min(left), epoch - 1), epoch, phase, timeout_s)

    def _test(self, peer: int, message: PendingMessage, phase: str) -> bool:
        try:
            return message.test()
        except ConnectionError as error:
            group = self.group
            if self._has_died(peer):
                raise RankLostError(group.rank, group.size, peer, phase) from error
            raise EPError(
                f"[rank {group.rank}/{group.size}] lost touch with rank {peer} in {phase}: {error}"
            ) from error

    def _has_died(self, peer: int) -> bool:
        """Whether a peer of this host has. Its connections close a moment before its process counts as ended."""
        deadline = time.monotonic() + 0.2
        while peer not in self.group.lost_ranks():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True
