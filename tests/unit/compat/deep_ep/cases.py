"""Streams and events of torch.cuda on a machine without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class FakeStream:
    """A stream by its number; waits are noted in its FakeStreams."""

    def __init__(self, streams: "FakeStreams", raw: int):
        self._streams, self.cuda_stream = streams, raw

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and self.cuda_stream == other.cuda_stream

    def wait_event(self, event: "FakeEvent") -> None:
        self._streams.waits.append((self.cuda_stream, event.stream))

    def wait_stream(self, other: "FakeStream") -> None:
        self._streams.waits.append((self.cuda_stream, f"all of {other.cuda_stream}"))


class FakeEvent:
    def __init__(self, streams: "FakeStreams"):
        self._streams, self.stream = streams, 0

    def record(self, stream: FakeStream | None = None) -> None:
        self.stream = self._streams.current if stream is None else stream.cuda_stream
        self._streams.events.append(self.stream)


class FakeStreams:
    """Replaces what torch.cuda says of streams."""

    def __init__(self, monkeypatch):
        self.current = 1  # number of the current stream
        self.captures = False  # whether the current stream is being captured
        self.waits: list[tuple[int, object]] = []  # (stream, stream of the event, or "all of" another stream)
        self.events: list[int] = []  # streams on which events were recorded, in order
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream(self.current))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captures)
        monkeypatch.setattr(torch.cuda, "stream", self._switch)
        monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(self))
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: self.current, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: self.captures, raising=False)

    def stream(self, raw: int) -> FakeStream:
        return FakeStream(self, raw)

    @contextmanager
    def _switch(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream.cuda_stream
        yield
        self.current = before
