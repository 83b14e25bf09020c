"""Preparation: requests with a grammar wait, outside the scheduler, until it is compiled. Knows nothing of steps.

A grammar is compiled in a thread, for it may take a while, and all ranks would wait for this one's step.
"""

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import llguidance

from eprt.engine.grammars import Grammars
from eprt.engine.outputs import TokenOutput
from eprt.engine.request import Request
from eprt.engine.scheduler import Scheduler

# How long a rank without other requests waits for a grammar before it takes part in the next step.
_PAUSE_S = 0.001


class Preparation:
    """One rank's requests on their way to its scheduler."""

    def __init__(self, grammars: Grammars, scheduler: Scheduler):
        self._grammars, self._scheduler = grammars, scheduler
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._waiting: dict[str, tuple[Request, Future[llguidance.LLMatcher]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Of the requests that wait here or in the scheduler."""
        return len(self._waiting) + len(self._scheduler.waiting)

    def add_request(self, request: Request) -> None:
        """ValueError if its id is in use."""
        if request.request_id in self._waiting or request.request_id in self._scheduler.requests:
            raise ValueError(f"request id {request.request_id!r} is already in use on this rank")
        outputs = request.params.structured_outputs
        if outputs is None:
            self._scheduler.add_request(request)
            return
        self._waiting[request.request_id] = request, self._thread.submit(self._grammars.compile, outputs)

    def drop_request(self, request_id: str) -> bool:
        """False if no such request waits here."""
        return self._waiting.pop(request_id, None) is not None

    def move_ready(self) -> list[TokenOutput]:
        """Hands requests whose grammars are compiled to the scheduler. Returns the ends of those that can never run."""
        if not self._waiting:
            return []
        if not self._scheduler.has_requests:
            wait([future for _, future in self._waiting.values()], _PAUSE_S, FIRST_COMPLETED)
        ends: list[TokenOutput] = []
        for request_id, (request, future) in list(self._waiting.items()):
            if not future.done():
                continue
            del self._waiting[request_id]
            try:
                request.grammar = future.result()
                self._scheduler.add_request(request)
            except ValueError as error:
                ends.append(TokenOutput(request_id, -1, finish_reason="abort", error=str(error)))
        return ends

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
