"""SideThread: runs one call at a time beside the step. Knows nothing of what it runs.

Handing a call over costs the step a few microseconds, an executor's future ten times as much: after a forward pass
nothing of the interpreter is left in the CPU's caches.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class SideThread(Generic[Result]):
    """One thread, started by the first call. At most one call is under way.

    function: what every call runs.
    """

    def __init__(self, name: str, function: Callable[..., Result]):
        self._name, self._function = name, function
        self._calls: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()  # arguments; None: it shall end
        self._results: SimpleQueue[tuple[Result | None, BaseException | None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.is_busy = False

    def start_call(self, *arguments: Any) -> None:
        assert not self.is_busy
        if self._thread is None:
            queues = self._calls, self._results
            self._thread = threading.Thread(target=_run, args=(self._function, *queues), name=self._name, daemon=True)
            self._thread.start()
        self.is_busy = True
        self._calls.put(arguments)

    def finish_call(self) -> Result:
        """Waits for the call. Raises what it raised."""
        assert self.is_busy
        result, error = self._results.get()
        self.is_busy = False
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def close(self) -> None:
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None


def _run(function: Callable[..., Any], calls: SimpleQueue, results: SimpleQueue) -> None:
    while (arguments := calls.get()) is not None:
        try:
            results.put((function(*arguments), None))
        except BaseException as error:
            results.put((None, error))
        del arguments  # else the tensors of a step would live until the next one
