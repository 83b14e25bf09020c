"""SharedMemoryTransport: chunks of experts through shared memory inside a node, as messages between nodes."""

import time
from collections.abc import Sequence

import numpy as np

from eprt.balancer.migration import Stream
from eprt.ep.group.group import EPGroup, PendingMessage
from eprt.ep.migration.chunk import ExpertChunk
from eprt.ep.migration.transport import DamagedChunkError, Transport
from eprt.ops import native

_CHUNK_BYTES = 4 << 20
_HEADER = 64  # int64 tag, checksum, bytes; the rest unused
_NUM_SETS = 2


class SharedMemoryTransport(Transport):
    """Inside a node chunks lie in the source's window, where all readers find them. Another node gets a chunk once, as
    a message to its first reader, into whose window it arrives.

    Construction is collective. Two sets of buffers: who writes set t % 2 in tick t knows that all ranks have ended tick
    t - 1, in which the chunk of tick t - 2 was received. Memory is used only once something moves.
    """

    def __init__(self, group: EPGroup):
        self.max_chunk_bytes, self.min_chunk_bytes = _CHUNK_BYTES, 16 << 10
        self._group, self._ops = group, native.load()
        self._slot_bytes = _HEADER + _CHUNK_BYTES
        self.buffer_bytes = 2 * _NUM_SETS * self._slot_bytes  # sent chunks, then arrived ones
        self._window = group.shared_window(self.buffer_bytes)
        self._tag = group.new_channel()
        self._messages: list[PendingMessage] = []

    def send(self, tick: int, tag: int, chunk: ExpertChunk) -> None:
        start_s = time.perf_counter()
        slot, parts = self._slot(self._group.rank, tick, arrived=False), _arrays(chunk)
        num_bytes = _copy(parts, slot[_HEADER:], into_parts=False)
        slot[:24].view(np.int64)[:] = tag, self._checksum(parts), num_bytes
        for entry in self._entries(chunk.stream):
            self._messages.append(self._group.isend(slot[: _HEADER + num_bytes], entry, self._tag))
        self._meter(num_bytes, time.perf_counter() - start_s)

    def expect(self, tick: int, tag: int, stream: Stream, num_bytes: int) -> None:
        group = self._group
        if group.rank in self._entries(stream):
            slot = self._slot(group.rank, tick, arrived=True)[: _HEADER + num_bytes]
            self._messages.append(group.irecv(slot, stream.source, self._tag))

    def is_done(self) -> bool:
        self._messages = [message for message in self._messages if not message.test()]
        return not self._messages

    def receive(self, tick: int, tag: int, chunk: ExpertChunk) -> None:
        start_s = time.perf_counter()
        slot, parts = self._chunk(tick, chunk.stream), _arrays(chunk)
        num_bytes = _copy(parts, slot[_HEADER:], into_parts=True)
        # Of what now lies in place, not of what passed by.
        if slot[:24].view(np.int64).tolist() != [tag, self._checksum(parts), num_bytes]:
            raise DamagedChunkError(f"{chunk.stream}: {num_bytes} B at {chunk.start}")
        self._meter(num_bytes, time.perf_counter() - start_s)

    def close(self) -> None:
        for message in self._messages:
            message.cancel()
        self._messages.clear()
        self._window.close()

    def _slot(self, rank: int, tick: int, *, arrived: bool) -> np.ndarray:
        """Header and chunk in the window of a rank of this node."""
        at = (_NUM_SETS * arrived + tick % _NUM_SETS) * self._slot_bytes
        return self._window.segments[self._group.local_ranks.index(rank)][at : at + self._slot_bytes]

    def _chunk(self, tick: int, stream: Stream) -> np.ndarray:
        """Header and bytes of a stream's chunk as this rank, a reader, finds them."""
        group = self._group
        if group.node_of_rank[stream.source] == group.node:
            return self._slot(stream.source, tick, arrived=False)
        entry = next(e for e in self._entries(stream) if group.node_of_rank[e] == group.node)
        return self._slot(entry, tick, arrived=True)

    def _entries(self, stream: Stream) -> list[int]:
        """The first reader on each node that is not the source's."""
        node_of_rank = self._group.node_of_rank
        first: dict[int, int] = {}
        for reader in stream.readers:
            first.setdefault(node_of_rank[reader], reader)
        first.pop(node_of_rank[stream.source], None)
        return list(first.values())

    def _checksum(self, parts: Sequence[np.ndarray]) -> int:
        value = 0
        for part in parts:
            value = self._ops.ep_checksum(part.ctypes.data, part.nbytes, value)
        return value


def _copy(parts: Sequence[np.ndarray], buffer: np.ndarray, *, into_parts: bool) -> int:
    at = 0
    for part in parts:
        there = buffer[at : at + len(part)]
        np.copyto(part, there) if into_parts else np.copyto(there, part)
        at += len(part)
    return at


def _arrays(chunk: ExpertChunk) -> list[np.ndarray]:
    return [part.numpy() for part in chunk.memory()]
