"""EventHandle and EventOverlap: a point of a CUDA stream for which other streams may wait."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class EventHandle:
    """An event, recorded at construction on stream; default: the current stream."""

    def __init__(self, stream: torch.cuda.Stream | None = None):
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def current_stream_wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """What an asynchronous call returns: its end, for which a stream may wait.

    As a context manager: what its body launches runs beside the communication; the current stream waits at the end.

    event: None if there is nothing to wait for.
    extra_tensors: kept alive as long as this object.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: Sequence[Tensor | None] | None = None):
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        if self.event is None:
            raise ValueError("EventOverlap.current_stream_wait: no event; was the call made without async_finish=True?")
        self.event.current_stream_wait()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        if self.event is not None:
            self.event.current_stream_wait()
