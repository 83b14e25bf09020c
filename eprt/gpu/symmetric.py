"""SymmetricMemory: the same allocation on every GPU of one NVLink domain, mapped into every process.

Ranks exchange CUDA IPC handles. Knows byte offsets, nothing of what lies there.
"""

import ctypes
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from eprt import env
from eprt.gpu.device import connected_by_nvlink
from eprt.gpu.driver import CudaError, api, check
from eprt.gpu.group import RankGroup


class SymmetricMemory:
    """Zeroed memory on every rank's current device. Construction and close() are collective.

    group: the ranks, one GPU each, or as many on one as EPRT_RANKS_PER_GPU allows.
    num_bytes: equal on all ranks.
    by_nvlink: refuse GPUs that reach each other by PCIe, which may tear a line of 128 bytes (csrc/cuda/lines.cuh).
    """

    _crosses_nodes = False  # whether ranks may be on several nodes

    def __init__(self, group: RankGroup, num_bytes: int, by_nvlink: bool = False):
        self.group, self.num_bytes, self._by_nvlink = group, num_bytes, by_nvlink
        self._where = f"[rank {group.rank}/{group.size}]"
        device = torch.cuda.current_device()
        self._device = torch.device("cuda", device)
        torch.zeros(1, device="cuda")  # creates the primary context
        self._agree(device)
        self._own = 0  # address of this rank's copy
        self._mapped: dict[int, int] = {}  # rank -> address of its copy, as mapped here
        self._closed = False
        self.peer_ptr: list[int] = []  # addresses of all ranks' copies, by rank
        handles = self._together(self._allocate)
        self.peer_ptr = self._together(lambda: self._map(handles))[group.rank]

    def _together(self, attempt: Callable[[], Any]) -> list[Any]:
        """The result of `attempt` on each rank. If it fails on one, all ranks raise that error: none waits for a rank
        that has given up."""
        result, problem = None, None
        try:
            result = attempt()
        except RuntimeError as error:  # the driver's and torch's
            problem = str(error)
        outcomes = self.group.allgather((result, problem))
        if found := next((problem for _, problem in outcomes if problem), None):
            self.close()
            raise CudaError(found)
        return [result for result, _ in outcomes]

    def _allocate(self) -> Any:
        """Allocates this rank's copy; returns what other ranks map it by."""
        cu = api()
        self._own = int(
            check(cu.cuMemAlloc(self.num_bytes), f"{self._where} {self.num_bytes} B of symmetric GPU memory")
        )
        check(cu.cuMemsetD8(self._own, 0, self.num_bytes), f"{self._where} clearing symmetric memory")
        torch.cuda.synchronize()
        return bytes(check(cu.cuIpcGetMemHandle(self._own), f"{self._where} exporting symmetric memory").reserved)

    def _map(self, handles: list[Any]) -> list[int]:
        """The addresses of all ranks' copies."""
        for rank, handle in enumerate(handles):
            if rank != self.group.rank:
                self._mapped[rank] = self._open(handle, rank)
        return [self._mapped.get(rank, self._own) for rank in range(self.group.size)]

    def remap(self, alive: Sequence[bool]) -> None:
        """With nothing under way: maps the copies of the ranks that take part now, of the processes that they are now,
        at the addresses of their predecessors, and no other rank's. Nothing where ranks cannot be replaced."""

    def _agree(self, device: int) -> None:
        """Before anything is allocated: sizes are equal and GPUs reach each other, else ValueError on all ranks."""
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        peers = self.group.allgather((uuid, self.group.node, self.num_bytes))
        here = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
        problems = self.group.allgather(self._problem(device, peers, here))
        if found := next((problem for problem in problems if problem), None):
            raise ValueError(found)

    def _problem(self, device: int, peers: list[tuple[str, int, int]], here: dict[str, int]) -> str | None:
        own_uuid, own_node, num_bytes = peers[self.group.rank]
        crowded = sum(peer[:2] == (own_uuid, own_node) for peer in peers) > env.get("EPRT_RANKS_PER_GPU")
        for rank, (uuid, node, size) in enumerate(peers):
            pair = f"{self._where} GPU {device} ({own_uuid}) and rank {rank}'s ({uuid})"
            if size != num_bytes:
                return f"{self._where} symmetric memory of {num_bytes} B, but rank {rank} asks for {size} B"
            if node != own_node and self._crosses_nodes:
                continue
            if node != own_node:
                remedy = "use one node, or backend='nvshmem', 'staged' or 'cpu'"
                return f"{pair} are on different nodes: no NVLink between them; {remedy}"
            if uuid == own_uuid and rank != self.group.rank and crowded:
                return (
                    f"{self._where} and rank {rank} share one GPU ({uuid}); give each rank its own (set_device), or, "
                    "where nothing is measured, let EPRT_RANKS_PER_GPU say how many may share one"
                )
            peer = here.get(uuid)
            if peer is None or uuid == own_uuid:
                continue
            if not torch.cuda.can_device_access_peer(device, peer):
                return f"{pair} have no peer access; see `nvidia-smi topo -p2p r`, or use backend='cpu'"
            if self._by_nvlink and not connected_by_nvlink(device, peer):
                return f"{pair} are not connected by NVLink, which mode='low_latency' needs; use mode='normal'"
        return None

    def _open(self, handle: bytes, rank: int) -> int:
        cu = api()
        ipc = cu.CUipcMemHandle()
        ipc.reserved = handle
        flags = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        try:
            return int(check(cu.cuIpcOpenMemHandle(ipc, flags), "cuIpcOpenMemHandle"))
        except CudaError as error:
            raise CudaError(
                f"{self._where} cannot map rank {rank}'s GPU memory: {error}. The two GPUs need peer access "
                "(`nvidia-smi topo -p2p r`) and the processes one IPC namespace (containers: --ipc=host)"
            ) from None

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, keep: object = None) -> Tensor:
        """A tensor over this rank's copy, not to be used after close(). keep: an object that lives as long as it."""
        length = prod(shape)
        storage = self.storage(offset, length * dtype.itemsize, keep)
        return torch.empty(0, dtype=dtype, device="cuda").set_(storage, 0, (length,), (1,)).view(shape)

    def storage(self, offset: int, num_bytes: int, keep: object = None) -> torch.UntypedStorage:
        """The same for Tensor.set_. keep: an object that lives as long as the storage, hence as any tensor on it."""
        if offset + num_bytes > self.num_bytes:
            raise ValueError(f"{num_bytes} B at {offset} reach beyond the {self.num_bytes} B of symmetric memory")
        storage: Any = torch._C._construct_storage_from_data_pointer(self._own + offset, self._device, num_bytes)
        storage.keep = keep  # torch keeps a storage's Python object until the storage goes
        return storage

    def close(self) -> None:
        """Collective while all ranks live: none frees what another still maps. Does not wait when one has died."""
        if self._closed:
            return
        self._closed = True
        torch.cuda.synchronize()
        self._barrier()
        self._unmap()
        self.peer_ptr = []
        self._barrier()
        if self._own:
            self._free()

    def _unmap(self) -> None:
        for rank, pointer in self._mapped.items():
            check(api().cuIpcCloseMemHandle(pointer), f"unmapping rank {rank}'s memory")

    def _free(self) -> None:
        check(api().cuMemFree(self._own), "freeing symmetric memory")

    def _barrier(self) -> None:
        if not self.group.lost_ranks():
            self.group.barrier()


class HostWords:
    """uint32 words in pinned host memory that kernels write directly. count: how many."""

    def __init__(self, count: int):
        cu = api()
        flags = cu.CU_MEMHOSTALLOC_DEVICEMAP | cu.CU_MEMHOSTALLOC_PORTABLE
        self._pointer = int(check(cu.cuMemHostAlloc(count * 4, flags), "pinned host memory"))
        self.words = (ctypes.c_uint32 * count).from_address(self._pointer)
        ctypes.memset(self._pointer, 0, count * 4)
        # The words' address on the GPU.
        self.device_ptr = int(check(cu.cuMemHostGetDevicePointer(self._pointer, 0), "mapping pinned host memory"))

    def close(self) -> None:
        if self._pointer:
            check(api().cuMemFreeHost(self._pointer), "freeing pinned host memory")
            self._pointer = 0
            self.words = (ctypes.c_uint32 * len(self.words))()
