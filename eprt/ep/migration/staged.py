"""Which transport GPUs get: their copy engines where they reach each other's memory, host memory where they do not."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from eprt.ep.group.group import EPGroup
from eprt.ep.migration.chunk import Chunk, Pool
from eprt.ep.migration.peer import PeerTransport
from eprt.ep.migration.peer_copies import PeerCopies
from eprt.ep.migration.transport import HOST_CHUNK_BYTES, DamagedChunkError, SharedMemoryTransport, Transport
from eprt.gpu.peers import PeerTensors, UnreachableError

_log = logging.getLogger(__name__)

# An expert of DeepSeek-V3 in bfloat16 has 88 MB; no buffer is as large, chunks go straight to their place.
PEER_CHUNK_BYTES = 64 << 20


def make_gpu_transport(group: EPGroup, pools: Sequence[Pool]) -> Transport:
    """Collective; the same on all ranks."""
    parts = [part for pool in pools for part in pool.parts]
    try:
        copies = PeerCopies(PeerTensors(group, parts))
    except UnreachableError as error:
        _log.log(logging.WARNING if group.rank == 0 else logging.DEBUG, "experts move through host memory: %s", error)
        return StagedTransport(group)
    return PeerTransport(group, pools, copies, PEER_CHUNK_BYTES)


class _HostChunk(Chunk):
    """A chunk whose bytes lie in host memory for now."""

    host: list[Tensor]

    def memory(self) -> list[Tensor]:
        return self.host


class StagedTransport:
    """SharedMemoryTransport for experts on GPUs, with copies before and behind it that wait for the GPU. Also between
    nodes."""

    def __init__(self, group: EPGroup):
        self._host = SharedMemoryTransport(group, HOST_CHUNK_BYTES)
        self.max_chunk_bytes, self.min_chunk_bytes = self._host.max_chunk_bytes, self._host.min_chunk_bytes
        self.buffer_bytes = self._host.buffer_bytes
        self.expect, self.is_done, self.measured = self._host.expect, self._host.is_done, self._host.measured
        self.settle, self.close = self._host.settle, self._host.close

    def send(self, tick: int, tag: int, chunk: Chunk) -> None:
        self._host.send(tick, tag, _on_host(chunk, [part.cpu() for part in chunk.memory()]))

    def take(self, tick: int, tag: int, chunk: Chunk) -> None:
        came = [torch.empty(part.shape, dtype=torch.uint8) for part in chunk.memory()]
        self._host.take(tick, tag, _on_host(chunk, came))
        for part, host in zip(chunk.memory(), came):
            part.copy_(host)
            if not torch.equal(part.cpu(), host):  # of what now lies in place
                raise DamagedChunkError(
                    f"{chunk.stream}: {chunk.num_bytes} B at {chunk.start}, on their way to the GPU"
                )


def _on_host(chunk: Chunk, memory: list[Tensor]) -> Chunk:
    moved = _HostChunk(*chunk)
    moved.host = memory
    return moved
