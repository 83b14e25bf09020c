"""ExpertChunk: a piece of an expert on its way, and the weight buffers that it lies in on this rank."""

from typing import NamedTuple, Protocol

from torch import Tensor

from eprt.balancer.migration import Stream


class WeightPool(Protocol):
    """Weight buffers for experts: see layers/experts.py ExpertPool. Equal on all ranks but for their contents."""

    parts: list[Tensor]  # uint8 [buffers, bytes]: of each part, an expert has the row of its buffer
    expert_bytes: int

    def take_buffer(self) -> int: ...
    def return_buffer(self, buffer: int) -> None: ...


class ByteRange(NamedTuple):
    """Bytes start..end of an expert's row of a part."""

    part: int
    start: int
    end: int


class ExpertChunk(NamedTuple):
    """Bytes start..start + num_bytes of an expert, its parts laid end to end."""

    stream: Stream
    pool: WeightPool
    buffer: int  # that holds the expert; on a rank that reads it, that shall hold it
    start: int
    num_bytes: int

    def ranges(self) -> list[ByteRange]:
        """The same bytes, part by part; empty ones left out."""
        ranges, at = [], 0
        for index, part in enumerate(self.pool.parts):
            size = part.shape[1]
            begin, end = max(self.start - at, 0), min(self.start + self.num_bytes - at, size)
            if begin < end:
                ranges.append(ByteRange(index, begin, end))
            at += size
        return ranges

    def memory(self) -> list[Tensor]:
        """uint8 views of them."""
        return [self.pool.parts[index][self.buffer, begin:end] for index, begin, end in self.ranges()]
