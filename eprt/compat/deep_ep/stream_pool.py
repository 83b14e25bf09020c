"""StreamPool: a MemoryPool of GPU memory, whose new owners wait on the GPU for streams that still use the memory.

Knows nothing of what lies in the blocks.
"""

import gc
from typing import Any

import torch

from eprt.compat.deep_ep.pool import Block, MemoryPool, PoolFullError

__all__ = ["PoolFullError", "StreamPool"]


class StreamPool:
    """Allocates blocks of GPU memory on the current device.

    A block must be released on the stream that used it last. As long as there is one stream, its order suffices. From
    the second stream on, every block that returns records an event.

    begin, num_bytes: the range, as for MemoryPool.
    """

    def __init__(self, begin: int, num_bytes: int):
        self._pool = MemoryPool(begin, num_bytes, self._mark)
        self.num_bytes = num_bytes
        self._device = torch.cuda.current_device()
        self._first: torch.cuda.Stream | None = None  # the stream that took the first block
        self._first_raw = -1  # the same as a number
        self._is_alone = True  # whether no other stream has taken a block

    def take_block(self, num_bytes: int) -> Block:
        """Memory that the current stream may write from now on. PoolFullError if none is free."""
        if not self._pool.fits(num_bytes):
            gc.collect()  # tensors in reference cycles keep their memory until then
        return self._take_for_stream(num_bytes)

    def try_take_block(self, num_bytes: int) -> Block | None:
        """The same, without collecting garbage; None if no memory is free."""
        return self._take_for_stream(num_bytes) if self._pool.fits(num_bytes) else None

    def shrink_block(self, block: Block, num_bytes: int) -> None:
        """Returns the memory beyond num_bytes, which must be unused so far, to the pool."""
        self._pool.shrink_block(block, num_bytes)

    def fits(self, num_bytes: int) -> bool:
        return self._pool.fits(num_bytes)

    def _take_for_stream(self, num_bytes: int) -> Block:
        graph = torch._C._cuda_isCurrentStreamCapturing()
        block = self._pool.take_block(num_bytes, graph)
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
        """The current stream is the first one, or not the first one."""
        stream = torch.cuda.current_stream()
        if self._first is None:
            self._first, self._first_raw = stream, stream.cuda_stream
            return
        stream.wait_stream(self._first)
        self._is_alone = False

    def _mark(self) -> Any:
        """(current stream, an event on it): until that event the stream may use memory that returns now."""
        if self._is_alone and torch._C._cuda_getCurrentRawStream(self._device) == self._first_raw:
            return None
        if torch._C._cuda_isCurrentStreamCapturing():
            return None
        stream, event = torch.cuda.current_stream(), torch.cuda.Event()
        event.record(stream)
        return stream, event
