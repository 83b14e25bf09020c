"""StagedTransport: chunks of experts on GPUs through host memory, where GPUs do not reach each other's."""

import torch
from torch import Tensor

from eprt.ep.migration.chunk import ExpertChunk
from eprt.ep.migration.shared_memory import SharedMemoryTransport
from eprt.ep.migration.transport import DamagedChunkError


class _HostChunk(ExpertChunk):
    """A chunk whose bytes lie in host memory for now."""

    host: list[Tensor]

    def memory(self) -> list[Tensor]:
        return self.host


class StagedTransport(SharedMemoryTransport):
    """SharedMemoryTransport for experts on GPUs, with copies before and behind it that wait for the GPU. Also between
    nodes."""

    def send(self, tick: int, tag: int, chunk: ExpertChunk) -> None:
        super().send(tick, tag, _on_host(chunk, [part.cpu() for part in chunk.memory()]))

    def receive(self, tick: int, tag: int, chunk: ExpertChunk) -> None:
        came = [torch.empty(part.shape, dtype=torch.uint8) for part in chunk.memory()]
        super().receive(tick, tag, _on_host(chunk, came))
        for part, host in zip(chunk.memory(), came):
            part.copy_(host)
            if not torch.equal(part.cpu(), host):  # of what now lies in place
                raise DamagedChunkError(
                    f"{chunk.stream}: {chunk.num_bytes} B at {chunk.start}, on their way to the GPU"
                )


def _on_host(chunk: ExpertChunk, memory: list[Tensor]) -> ExpertChunk:
    moved = _HostChunk(*chunk)
    moved.host = memory
    return moved
