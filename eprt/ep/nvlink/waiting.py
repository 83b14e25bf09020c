"""KernelWait: the wait for another rank that a kernel is in now, from the word that it writes into host memory.

A wait writes the word again and again (tell_wait in csrc/cuda/common.cuh), so a word that no longer changes is that of
a wait which is over. Knows nothing of deadlines.
"""

import time
from typing import Any

from eprt.ep.group.current_wait import CurrentWait
from eprt.ep.nvlink.failure import WAITS

_TOLD_NS = 1 << 20  # the word's unit of time
_KEPT_S = 0.7  # a word is written every 268 ms; looks may come more often


class KernelWait:
    """words: two uint32 in host memory, little-endian: code << 56 | peer << 48 | time waited."""

    def __init__(self, words: Any):
        self._words = words
        self._seen, self._changed_s = self._read(), -1e9

    def look(self) -> CurrentWait | None:
        """None where no wait has lasted a quarter of a second, or the latest one is over."""
        word, now_s = self._read(), time.monotonic()
        if word != self._seen:
            self._seen, self._changed_s = word, now_s
        if now_s - self._changed_s > _KEPT_S:
            return None
        code, peer, told = word >> 56, word >> 48 & 0xFF, word & (1 << 48) - 1
        waited_s = told * _TOLD_NS * 1e-9 + now_s - self._changed_s
        return CurrentWait(peer, WAITS.get(code, "a signal"), now_s - waited_s)

    def _read(self) -> int:
        """The GPU writes all 64 bits at once; the host reads halves until they fit."""
        while True:
            high, low = self._words[1], self._words[0]
            if self._words[1] == high:
                return high << 32 | low
