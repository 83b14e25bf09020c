"""StagedTransport: chunks of experts on GPUs through host memory, where GPUs do not reach each other's."""

import torch
from torch import Tensor

from eprt.balancer.migration import Stream
from eprt.ep.group.group import EPGroup
from eprt.ep.migration.chunk import ExpertChunk
from eprt.ep.migration.shared_memory import HOST_CHUNK_BYTES, SharedMemoryTransport
from eprt.ep.migration.transport import DamagedChunkError, Transport


class _HostChunk(ExpertChunk):
    """A chunk whose bytes lie in host memory for now."""

    host: list[Tensor]

    def memory(self) -> list[Tensor]:
        return self.host


class StagedTransport(Transport):
    """SharedMemoryTransport for experts on GPUs, with copies before and behind it that wait for the GPU. Also between
    nodes."""

    def __init__(self, group: EPGroup):
        self._host = SharedMemoryTransport(group, HOST_CHUNK_BYTES)
        self.max_chunk_bytes, self.min_chunk_bytes = self._host.max_chunk_bytes, self._host.min_chunk_bytes
        self.buffer_bytes = self._host.buffer_bytes

    def send(self, tick: int, tag: int, chunk: ExpertChunk) -> None:
        self._host.send(tick, tag, _on_host(chunk, [part.cpu() for part in chunk.memory()]))

    def expect(self, tick: int, tag: int, stream: Stream, num_bytes: int) -> None:
        self._host.expect(tick, tag, stream, num_bytes)

    def receive(self, tick: int, tag: int, chunk: ExpertChunk) -> None:
        came = [torch.empty(part.shape, dtype=torch.uint8) for part in chunk.memory()]
        self._host.receive(tick, tag, _on_host(chunk, came))
        for part, host in zip(chunk.memory(), came):
            part.copy_(host)
            if not torch.equal(part.cpu(), host):  # of what now lies in place
                raise DamagedChunkError(
                    f"{chunk.stream}: {chunk.num_bytes} B at {chunk.start}, on their way to the GPU"
                )

    def is_done(self) -> bool:
        return self._host.is_done()

    def reset_meter(self) -> tuple[int, float]:
        return self._host.reset_meter()

    def is_quiet(self) -> bool:
        return self._host.is_quiet()

    def close(self) -> None:
        self._host.close()


def _on_host(chunk: ExpertChunk, memory: list[Tensor]) -> ExpertChunk:
    moved = _HostChunk(*chunk)
    moved.host = memory
    return moved
