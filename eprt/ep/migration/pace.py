"""Pace: how many bytes of an expert one step may copy, and how often, so that nobody who waits for a token notices.

A rank may spend a small part of a typical step's time on copying. It knows from its own latest copies how long bytes
take, all that belongs to them included. The ranks show each other what fits, and the smallest figure counts for all.
However little is copied, the host has some work with it; where steps are short, it rests for some of them.
"""

import statistics
import time
from collections import deque

SHARE = 0.03  # of a step
_HOST_SHARE = 0.05  # of the host's time
_WINDOW = 31  # latest steps that count
_LONGEST_REST_S = 0.2
_IDLE_PART = 4  # where nobody waits for a token: so many times less than the most
_START_BYTES_PER_S = 1e9
_QUIET_S = 1.0


class Pace:
    """share: part of a step that may go into copying; above 1, the host never rests either. min_bytes, max_bytes: least
    and most in one step."""

    def __init__(self, share: float = SHARE, min_bytes: int = 16 << 10, max_bytes: int = 4 << 20):
        self._share, self._min_bytes, self._max_bytes = share, min_bytes, max_bytes
        self._rests_until_s = 0.0
        self._step_s: deque[float] = deque(maxlen=_WINDOW)
        self._latest_s = -_QUIET_S
        self._bytes_per_s = _START_BYTES_PER_S

    @property
    def budget_s(self) -> float:
        """What a step may spend on moving experts; 0 before the first step that computes."""
        # The median of the latest: neither one long prompt nor one hiccup counts.
        return self._share * statistics.median(self._step_s) if self._step_s else 0.0

    @property
    def room(self) -> int:
        """Bytes that this rank can send, and take in as many, in one step."""
        if self._is_quiet:
            return self._max_bytes // _IDLE_PART
        # Half for what leaves, half for what comes.
        return int(min(max(self.budget_s * self._bytes_per_s / 2, self._min_bytes), self._max_bytes)) // 64 * 64

    @property
    def rests(self) -> bool:
        """Whether the host has done its share for now; never where nobody waits for a token."""
        return self._share <= 1 and not self._is_quiet and time.perf_counter() < self._rests_until_s

    @property
    def _is_quiet(self) -> bool:
        return time.perf_counter() - self._latest_s > _QUIET_S

    def worked(self, seconds: float) -> None:
        """The host has spent so much processor time on moving experts."""
        rest_s = min(seconds / _HOST_SHARE, _LONGEST_REST_S)
        self._rests_until_s = max(self._rests_until_s, time.perf_counter()) + rest_s

    def stepped(self, seconds: float) -> None:
        """A step has computed, in so much time without what was spent on moving."""
        self._step_s.append(seconds)
        self._latest_s = time.perf_counter()

    def copied(self, num_bytes: int, seconds: float) -> None:
        """So much was sent and taken in within one step."""
        if num_bytes and seconds > 0:
            # By at most a factor of two each time: a rank that lost the processor meanwhile looks slow, and is not.
            speed = self._bytes_per_s
            self._bytes_per_s = min(max(num_bytes / seconds, speed / 2), speed * 2)
