"""NvshmemBackend: low latency among GPUs of several nodes: inside a node as nvlink, between nodes by NVSHMEM."""

from dataclasses import replace
from typing import Any

import torch

from eprt.ep.nvlink.low_latency import LowLatency
from eprt.ep.nvlink.low_latency_backend import NvlinkLowLatencyBackend
from eprt.ep.nvlink.low_latency_layout import LowLatencyHeap
from eprt.ep.nvlink.node_copies import node_copies_are_faster
from eprt.gpu.jit import KernelSource
from eprt.gpu.launch import Kernel
from eprt.gpu.nvshmem_kernel import NvshmemKernel
from eprt.gpu.nvshmem_memory import NvshmemMemory
from eprt.gpu.symmetric import SymmetricMemory

_MOST_RANKS_RUN = 8  # copies by node have not run on more, emulated or not: there somebody must name them


class NvshmemLowLatency(LowLatency):
    """As LowLatency, for a shape with node_ranks."""

    def _new_memory(self, num_bytes: int, by_nvlink: bool) -> SymmetricMemory:
        return NvshmemMemory(self.group, num_bytes, self.group.num_ranks_on_host == self.group.size)

    def _new_kernel(self, source: KernelSource, entry: str, num_threads: int, shared_bytes: int = 0) -> Kernel:
        assert isinstance(self.memory, NvshmemMemory) and self.memory.nvshmem is not None
        return NvshmemKernel(self.memory.nvshmem, source, entry, num_threads, shared_bytes)

    def close(self) -> None:
        """Kernels go first: they are attached to what the memory is of."""
        for kernel in (*self._dispatch_kernels.values(), *self._combine_kernels.values()):
            kernel.close()
        super().close()


class NvshmemBackend(NvlinkLowLatencyBackend):
    """As NvlinkLowLatencyBackend, for ranks on several nodes, equally many on each, in order."""

    _kernels_type = NvshmemLowLatency

    def _check_machine(self) -> None:
        super()._check_machine()
        node_of_rank, per_node = self.group.node_of_rank, len(self.group.local_ranks)
        if node_of_rank != tuple(rank // per_node for rank in range(self.group.size)):
            self._checks.fail(
                f"nodes of the ranks: {list(node_of_rank)}; NVSHMEM needs equally many ranks on each node, in order: "
                "start as many on every host (mpirun --map-by ppr:N:node), or use backend='staged'"
            )
        if self.group.fd_desk() is not None:
            self._checks.fail("ranks that may be lost and replaced cannot use NVSHMEM: its ranks stay as they began")

    def _shape(self) -> LowLatencyHeap:
        shape = replace(super()._shape(), node_ranks=len(self.group.local_ranks))
        copies = self.options.copies
        if copies == "auto":
            copies = getattr(self.group, "gpu_copies", "auto")  # of a WireGroup
        if copies == "auto":
            has_run = shape.num_ranks <= _MOST_RANKS_RUN
            copies = "node" if has_run and node_copies_are_faster(shape) else "rank"
        return replace(shape, layered=copies == "node")

    def crossings(self) -> tuple[int, int]:
        """Messages of dispatches, and rows of combines, that this rank has sent to other nodes. Waits for the GPU."""
        kernels = self.kernels
        crossed = kernels.memory.view(kernels.shape.offsets()["crossed"], (2,), torch.int64)
        messages, rows = crossed.tolist()
        return messages, rows

    def readmit(self) -> None:
        """What was put to a rank that did not take it may still be under way."""
        self._checks.fail("readmit: over NVSHMEM a rank that was masked does not come back; make a new group")

    def mask_rank(self, rank: int, masked: bool = True) -> None:
        if not masked:
            self.readmit()
        super().mask_rank(rank, masked)

    def require_restartable(self) -> Any:
        self._checks.fail("over NVSHMEM ranks cannot be replaced")
