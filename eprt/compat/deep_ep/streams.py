"""CommStream: on which stream a call runs, and what that stream waits for first.

DeepEP runs everything on a stream of its own, to which the caller's stream is tied before and after. Only with
async_finish does that show, so only then is the second stream used here; else a call runs on the current stream.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from eprt.compat.deep_ep.event import EventHandle, EventOverlap

_AS_IT_IS = nullcontext()


class CommStream:
    """Of one set of kernels: their launches reach the GPU in the order of the calls, on whatever streams."""

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream
        self.caller = stream  # the current stream of the last asynchronous call
        self._device = torch.cuda.current_device()
        self._last = stream
        self._last_key = -1, False  # of the last launch: raw stream, whether it was captured

    def run(self, async_finish: bool, previous_event: EventOverlap | None = None) -> AbstractContextManager:
        """In its body calls are launched. previous_event: all that an asynchronous call waits for, instead of the
        current stream."""
        event = None if previous_event is None else previous_event.event
        if not async_finish and event is None and self.stays():
            return _AS_IT_IS
        caller = self.caller = torch.cuda.current_stream()
        stream = self.stream if async_finish else caller
        if event is not None:
            stream.wait_event(event.event)
        elif async_finish:
            stream.wait_stream(caller)
        self._follow(stream)
        return torch.cuda.stream(stream) if async_finish else _AS_IT_IS

    def stays(self) -> bool:
        """Whether a call on the current stream comes where the last one came: nothing to wait for, run() not needed.
        The usual case, without the microseconds that the others take."""
        raw, captured = self._last_key
        return (
            torch._C._cuda_getCurrentRawStream(self._device) == raw
            and torch._C._cuda_isCurrentStreamCapturing() == captured
        )

    def raw(self) -> int:
        """The current stream."""
        return torch._C._cuda_getCurrentRawStream(self._device)

    @contextmanager
    def resume(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """In its body the second half of a call is launched, on the stream of its first half."""
        with torch.cuda.stream(stream):
            self._follow(stream)
            yield

    def event(self, async_finish: bool) -> EventHandle | None:
        """After run(): what the caller may wait for."""
        return EventHandle(self.stream) if async_finish else None

    def _follow(self, stream: torch.cuda.Stream) -> None:
        key = stream.cuda_stream, torch.cuda.is_current_stream_capturing()
        # A launch that is captured and one that is not have no order to keep.
        if self._last_key[0] != -1 and self._last_key != key and self._last_key[1] == key[1]:
            stream.wait_stream(self._last)
        self._last, self._last_key = stream, key
