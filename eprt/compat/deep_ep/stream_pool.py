"""StreamPool: a MemoryPool of GPU memory, whose new owners wait on the GPU for streams that still use the memory."""

import gc
from typing import Any

import torch

from eprt.compat.deep_ep.pool import Block, MemoryPool


class StreamPool(MemoryPool):
    """Allocates blocks of GPU memory on the current device.

    A block must be released on the stream that used it last. As long as there is one stream, its order suffices. From
    the second stream on, every block that returns records an event.
    """

    def __init__(self, begin: int, num_bytes: int):
        super().__init__(begin, num_bytes, self._mark_stream)
        self._device = torch.cuda.current_device()
        self._first: torch.cuda.Stream | None = None  # the stream that took the first block
        self._first_raw = -1  # the same as a number
        self._is_alone = True  # whether no other stream has taken a block

    def take_block(self, num_bytes: int) -> Block:
        """Memory that the current stream may write from now on. PoolFullError if none is free."""
        if not self.fits(num_bytes):
            gc.collect()  # tensors in reference cycles keep their memory until then
        return self._take_for_stream(num_bytes)

    def try_take_block(self, num_bytes: int) -> Block | None:
        """The same, without collecting garbage; None if no memory is free."""
        return self._take_for_stream(num_bytes) if self.fits(num_bytes) else None

    def _take_for_stream(self, num_bytes: int) -> Block:
        graph = torch._C._cuda_isCurrentStreamCapturing()
        block = super().take_block(num_bytes, graph)
        if graph:  # all earlier work is complete before a capture
            return block
        if self._is_alone and torch._C._cuda_getCurrentRawStream(self._device) != self._first_raw:
            self._note_new_stream()
        if block.marks:
            stream = torch.cuda.current_stream()
            for user, event in block.marks:
                if user != stream:
                    stream.wait_event(event)
        return block

    def _note_new_stream(self) -> None:
        stream = torch.cuda.current_stream()
        if self._first is None:
            self._first, self._first_raw = stream, stream.cuda_stream
            return
        stream.wait_stream(self._first)
        self._is_alone = False

    def _mark_stream(self) -> Any:
        """(current stream, an event on it): until that event the stream may use memory that returns now."""
        if self._is_alone and torch._C._cuda_getCurrentRawStream(self._device) == self._first_raw:
            return None
        if torch._C._cuda_isCurrentStreamCapturing():
            return None
        stream, event = torch.cuda.current_stream(), torch.cuda.Event()
        event.record(stream)
        return stream, event
