"""RequestQueue: the requests of a rank that wait, by priority and order of arrival; and whom the first displaces.

Knows nothing of steps or of how pages and rows are given out.
"""

from collections.abc import Sequence

from eprt.engine.kv_cache import PagePool
from eprt.engine.request import Request


class RequestQueue:
    """Smaller priorities come first."""

    def __init__(self):
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def head(self) -> Request:
        """The request to run next. There must be one."""
        return self._requests[0]

    def add_request(self, request: Request, is_first: bool = False) -> None:
        """Puts a request behind or, if is_first, before all others of its priority."""
        limit, num_before = request.priority - is_first, len(self._requests)
        while num_before and self._requests[num_before - 1].priority > limit:
            num_before -= 1
        self._requests.insert(num_before, request)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def find_displaced(self, running: Sequence[Request], pool: PagePool, max_running: int) -> list[Request]:
        """The running requests of larger priority, last first, that give way to the head. None where it finds room
        without that, or not even so.

        running: by priority, oldest first. Pages that the head could share do not count: they may be gone by then.
        """
        if not self._requests or not running or self.head.priority >= running[-1].priority:
            return []
        # A page must stay available for each running request (scheduler.py).
        lacking = pool.num_needed(len(self.head.tokens_L)) + len(running) - pool.num_available
        displaced: list[Request] = []
        for request in reversed(running):
            if self._has_room(lacking, running, displaced, max_running) or request.priority <= self.head.priority:
                break
            displaced.append(request)
            lacking -= len(request.pages) + len(request.tail) + 1
        return displaced if self._has_room(lacking, running, displaced, max_running) else []

    def _has_room(self, lacking: int, running: Sequence[Request], displaced: list[Request], max_running: int) -> bool:
        return lacking <= 0 and len(running) - len(displaced) < max_running
