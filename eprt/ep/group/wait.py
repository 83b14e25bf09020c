"""How a rank waits for others: asleep in bounded slices, with a deadline, looking now and then whether they live.

A slice is one native call without the GIL. Between slices Python runs signal handlers, so Ctrl-C and SIGTERM work.
"""

import math
import os
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from eprt.ep.errors import EPError, EPTimeoutError, RankLostError
from eprt.ep.group.group import EPGroup, PendingMessage
from eprt.ops import native

SLICE_NS = 20_000_000


class Waiter:
    """Waits of one rank. timeout_s: deadline of each wait unless the call gives another (math.inf for none)."""

    def __init__(self, group: EPGroup, timeout_s: float):
        self.group = group
        self.timeout_s = timeout_s
        # Decides how the first microseconds of a wait are spent (csrc/cpu/ep_flag.cpp).
        self.owns_core = group.num_ranks_on_host <= (os.cpu_count() or 1)
        self._ops = native.load()

    def for_call(
        self,
        wait_slice: Callable[..., int],
        arguments: tuple,
        describe: Callable[[int], tuple[int, int]],
        epoch: int,
        phase: str,
        timeout_s: float | None = None,
    ) -> None:
        """Until wait_slice(*arguments), a native call that waits at most SLICE_NS, returns a negative number.

        Otherwise it returns what it still waits for; describe tells its rank and the epoch seen.
        """
        if wait_slice(*arguments) >= 0:
            self._repeat(lambda: wait_slice(*arguments), describe, epoch, phase, timeout_s)

    def for_flags(
        self, flags: Tensor, epoch: int, peers: Sequence[int], phase: str, timeout_s: float | None = None
    ) -> None:
        """Until every flag (int64 addresses) has reached epoch; flag i is raised on behalf of rank peers[i]."""
        self.for_call(
            self._ops.ep_wait,
            (flags, epoch, self.owns_core, SLICE_NS),
            lambda i: (peers[i], self._ops.ep_flag_epoch(flags[i].item())),
            epoch,
            phase,
            timeout_s,
        )

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
            end = time.monotonic() + SLICE_NS * 1e-9
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

        if poll() >= 0:
            self._repeat(poll, lambda _: (min(left), epoch - 1), epoch, phase, timeout_s)

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

    def _repeat(
        self,
        wait_slice: Callable[[], int],
        describe: Callable[[int], tuple[int, int]],
        expected: int,
        phase: str,
        timeout_s: float | None = None,
    ) -> None:
        """Repeats wait_slice() until it returns a negative number.

        describe(i): the rank and the epoch seen of the pending i. Raises RankLostError when a rank of this host has
        died, EPTimeoutError at the deadline.
        """
        group = self.group
        start = time.monotonic()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        while True:
            if lost := group.lost_ranks():
                raise RankLostError(group.rank, group.size, lost[0], phase)
            index = wait_slice()
            if index < 0:
                return
            waited_s = time.monotonic() - start
            if waited_s > limit_s and not math.isinf(limit_s):
                peer, seen = describe(index)
                raise EPTimeoutError(group.rank, group.size, peer, phase, seen, expected, waited_s)
