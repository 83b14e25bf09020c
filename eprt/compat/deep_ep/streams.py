"""CommStream: on which stream a call runs, and what that stream waits for first.

DeepEP runs everything on a stream of its own and joins the caller's stream with it before and after. That makes a
difference only with async_finish, so only then is the second stream used here; otherwise a call runs on the current
stream. Knows nothing of what calls launch.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from eprt.compat.deep_ep.event import EventHandle, EventOverlap

_NO_SWITCH = nullcontext()


class CommStream:
    """The streams of one set of kernels, whose launches reach the GPU in the order of the calls on any streams."""

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream  # for calls with async_finish
        self.caller = stream  # the stream that was current at the last run_call
        self._device = torch.cuda.current_device()
        self._last = stream  # of the last launch
        self._last_key = -1, False  # of the last launch: raw stream, whether it was captured

    def run_call(self, async_finish: bool, previous_event: EventOverlap | None = None) -> AbstractContextManager:
        """A context in which a call is launched. previous_event: what an asynchronous call waits for instead of the
        current stream."""
        event = None if previous_event is None else previous_event.event
        if not async_finish and event is None and self.stays_on_stream():
            return _NO_SWITCH
        caller = self.caller = torch.cuda.current_stream()
        stream = self.stream if async_finish else caller
        if event is not None:
            stream.wait_event(event.event)
        elif async_finish:
            stream.wait_stream(caller)
        self._wait_for_last(stream)
        return torch.cuda.stream(stream) if async_finish else _NO_SWITCH

    def stays_on_stream(self) -> bool:
        """Whether the current stream is that of the last launch: a synchronous call then needs no run_call. This is the
        usual case, and saves some microseconds."""
        raw, captured = self._last_key
        return (
            torch._C._cuda_getCurrentRawStream(self._device) == raw
            and torch._C._cuda_isCurrentStreamCapturing() == captured
        )

    def raw_stream(self) -> int:
        """The current stream as a number."""
        return torch._C._cuda_getCurrentRawStream(self._device)

    @contextmanager
    def resume_call(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """A context in which the second half of a call is launched, on the stream of its first half."""
        with torch.cuda.stream(stream):
            self._wait_for_last(stream)
            yield

    def record_event(self, async_finish: bool) -> EventHandle | None:
        """After run_call: what the caller may wait for."""
        return EventHandle(self.stream) if async_finish else None

    def _wait_for_last(self, stream: torch.cuda.Stream) -> None:
        key = stream.cuda_stream, torch.cuda.is_current_stream_capturing()
        # A captured launch and one that is not captured need no order.
        if self._last_key[0] != -1 and self._last_key != key and self._last_key[1] == key[1]:
            stream.wait_stream(self._last)
        self._last, self._last_key = stream, key
