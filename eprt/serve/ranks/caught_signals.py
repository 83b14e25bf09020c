"""CaughtSignals: the signals that stop a launcher: they wake it, and are counted.

Knows nothing of what the launcher does then.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class CaughtSignals:
    """From construction, in the main thread, to close()."""

    def __init__(self):
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.times_s: list[float] = []  # when they came, by time.monotonic
        self._before = {number: signal.getsignal(number) for number in (*STOPS, signal.SIGCHLD)}
        for number in STOPS:
            signal.signal(number, lambda *_: self.times_s.append(time.monotonic()))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wake_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def wait(self, sources: Sequence[int], timeout_s: float) -> list[int]:
        """Until a signal comes (also the end of a child), a source is readable, which is told, or the time is over."""
        ready, _, _ = select.select([self._reader, *sources], [], [], timeout_s)
        if self._reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 4096)
        return [fd for fd in ready if fd != self._reader]

    def close(self) -> None:
        signal.set_wakeup_fd(self._wake_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)
