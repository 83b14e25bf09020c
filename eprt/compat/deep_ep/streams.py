"""CommStream: on which stream a call runs, and what that stream waits for first.

DeepEP runs everything on a stream of its own, to which the caller's stream is tied before and after. Only with
async_finish does that show, so only then is the second stream used here; else a call runs on the current stream.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from eprt.compat.deep_ep.event import EventHandle, EventOverlap


class Run:
    """Enters the stream, unless it is the current one anyway. A class: cheaper than a generator."""

    __slots__ = ("_scope", "stream")

    def __init__(self, stream: torch.cuda.Stream, scope: Any):
        self.stream, self._scope = stream, scope

    def __enter__(self) -> torch.cuda.Stream:
        if self._scope is not None:
            self._scope.__enter__()
        return self.stream

    def __exit__(self, *error: object) -> None:
        if self._scope is not None:
            self._scope.__exit__(*error)


class CommStream:
    """Of one set of kernels: their launches reach the GPU in the order of the calls, on whatever streams."""

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream
        self.caller = stream  # the current stream of the last call
        self._last: tuple[torch.cuda.Stream, bool] | None = None  # and whether it was capturing a graph

    def run(self, async_finish: bool, previous_event: EventOverlap | None = None) -> "Run":
        """In its body calls are launched. previous_event: all that an asynchronous call waits for, instead of the
        current stream."""
        caller = self.caller = torch.cuda.current_stream()
        stream = self.stream if async_finish else caller
        if previous_event is not None and previous_event.event is not None:
            stream.wait_event(previous_event.event.event)
        elif async_finish:
            stream.wait_stream(caller)
        self._follow(stream)
        return Run(stream, torch.cuda.stream(stream) if async_finish else None)

    @contextmanager
    def resume(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """The body launches the second half of a call on the stream of its first half."""
        with torch.cuda.stream(stream):
            self._follow(stream)
            yield

    def event(self, async_finish: bool) -> EventHandle | None:
        """After run(): what the caller may wait for."""
        return EventHandle(self.stream) if async_finish else None

    def _follow(self, stream: torch.cuda.Stream) -> None:
        capturing = torch.cuda.is_current_stream_capturing()
        # A launch that is captured and one that is not have no order to keep.
        if self._last is not None and self._last != (stream, capturing) and self._last[1] == capturing:
            stream.wait_stream(self._last[0])
        self._last = stream, capturing
