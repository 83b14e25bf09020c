"""HeartbeatThread: tells the frontend twice a second what its rank is at, also while the main thread waits or computes.

The main thread is not disturbed: it leaves what it waits for where this thread finds it. Knows nothing of who is late.
"""

import logging
import threading
import time
from collections.abc import Callable

from eprt.ep.group.current_wait import CurrentWait
from eprt.serve.ranks.channel import Channel, FrontendLostError
from eprt.serve.ranks.messages import Heartbeat

BEAT_S = 0.5

_log = logging.getLogger(__name__)


class HeartbeatThread:
    """From construction to close(); a context manager.

    Args:
        channel: to the frontend.
        is_asleep: whether the main thread is in no step.
        waits: where waits that last are shown: the first that tells one counts.
        on_beat: what else is done then.
    """

    def __init__(
        self,
        channel: Channel,
        is_asleep: Callable[[], bool],
        waits: tuple[Callable[[], CurrentWait | None], ...],
        on_beat: Callable[[], None] = lambda: None,
    ):
        self._channel, self._is_asleep, self._waits, self._on_beat = channel, is_asleep, waits, on_beat
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eprt-heartbeat", daemon=True)
        self._thread.start()

    def beat(self) -> Heartbeat:
        """As of now."""
        asleep, cpu_s = self._is_asleep(), time.process_time()
        wait = None if asleep else next((wait for look in self._waits if (wait := look()) is not None), None)
        if wait is None:
            return Heartbeat(asleep, cpu_s)
        return Heartbeat(asleep, cpu_s, wait.peer, wait.phase, max(0.0, time.monotonic() - wait.since_s))

    def _run(self) -> None:
        try:
            while not self._closed.wait(BEAT_S):
                self._channel.send(self.beat())
                self._on_beat()
        except FrontendLostError:
            pass  # the main thread finds it, too
        except Exception:
            _log.exception("no heartbeats any more: this rank will be taken for one that hangs")

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> "HeartbeatThread":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()
