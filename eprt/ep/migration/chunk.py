"""Chunk: a piece of an expert on its way, and the memory that it lies in on this rank."""

from typing import NamedTuple, Protocol

from torch import Tensor

from eprt.balancer.migration import Stream


class Pool(Protocol):
    """Memory for experts: see layers/experts.py ExpertPool. parts: uint8 [storages, bytes], of which an expert has a
    row of each, in its storage; equal on all ranks but for their contents."""

    parts: list[Tensor]
    expert_bytes: int

    def take(self) -> int: ...
    def give_back(self, storage: int) -> None: ...


class Range(NamedTuple):
    """Bytes start..end of an expert's row of a part."""

    part: int
    start: int
    end: int


class Chunk(NamedTuple):
    """Bytes start..start + num_bytes of the expert in a storage, its parts laid end to end; on a rank that reads it, of
    the storage where it shall lie."""

    stream: Stream
    pool: Pool
    storage: int
    start: int
    num_bytes: int

    def ranges(self) -> list[Range]:
        """The same bytes, part by part; empty ones left out."""
        ranges, at = [], 0
        for index, part in enumerate(self.pool.parts):
            size = part.shape[1]
            begin, end = max(self.start - at, 0), min(self.start + self.num_bytes - at, size)
            if begin < end:
                ranges.append(Range(index, begin, end))
            at += size
        return ranges

    def memory(self) -> list[Tensor]:
        """uint8 views of them."""
        parts, storage = self.pool.parts, self.storage
        return [parts[index][storage, begin:end] for index, begin, end in self.ranges()]
