"""StreamPool: a Pool of GPU memory. Who takes a block waits, on the GPU, for streams that still use what lay there."""

import gc
from typing import Any

import torch

from eprt.compat.deep_ep.pool import Block, Pool, PoolFullError

__all__ = ["PoolFullError", "StreamPool"]


class StreamPool:
    """begin, num_bytes: as Pool's, on the current device.

    A block is let go of on the stream that used it last. As long as one stream does everything, nothing is noted for
    that: order on the stream is enough. From the second stream on, each block that goes back records an event.
    """

    def __init__(self, begin: int, num_bytes: int):
        self._pool = Pool(begin, num_bytes, self._mark)
        self.num_bytes = num_bytes
        self._device = torch.cuda.current_device()
        self._first: torch.cuda.Stream | None = None
        self._only = -1  # _first as a raw stream
        self._is_alone = True

    def take(self, num_bytes: int) -> Block:
        """Memory that the current stream may write from now on. Raises PoolFullError."""
        if not self._pool.fits(num_bytes):
            gc.collect()  # tensors in reference cycles keep their memory until then
        return self._take(num_bytes)

    def take_at_once(self, num_bytes: int) -> Block | None:
        """The same, or None where memory would have to be found first."""
        return self._take(num_bytes) if self._pool.fits(num_bytes) else None

    def shrink(self, block: Block, num_bytes: int) -> None:
        """What is beyond num_bytes, and has not been written, is the pool's again."""
        self._pool.shrink(block, num_bytes)

    def fits(self, num_bytes: int) -> bool:
        return self._pool.fits(num_bytes)

    def _take(self, num_bytes: int) -> Block:
        graph = torch._C._cuda_isCurrentStreamCapturing()
        block = self._pool.take(num_bytes, graph)
        if graph:  # before a capture all work is done
            return block
        if self._is_alone and torch._C._cuda_getCurrentRawStream(self._device) != self._only:
            self._meet_another()
        if block.marks:
            stream = torch.cuda.current_stream()
            for user, event in block.marks:
                if user != stream:
                    stream.wait_event(event)
        return block

    def _meet_another(self) -> None:
        """The current stream is not the one that has done everything."""
        stream = torch.cuda.current_stream()
        if self._first is None:
            self._first, self._only = stream, stream.cuda_stream
            return
        stream.wait_stream(self._first)
        self._is_alone = False

    def _mark(self) -> Any:
        """What the current stream has been given so far: memory that goes back now may be in use by it."""
        if self._is_alone and torch._C._cuda_getCurrentRawStream(self._device) == self._only:
            return None
        if torch._C._cuda_isCurrentStreamCapturing():
            return None
        stream, event = torch.cuda.current_stream(), torch.cuda.Event()
        event.record(stream)
        return stream, event
