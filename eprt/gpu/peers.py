"""PeerTensors: tensors of other ranks' GPUs, mapped into this process.

SymmetricMemory allocates memory; PeerTensors maps what torch has already allocated, up to all weights of a model. A
mapping takes address space, no memory.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eprt.gpu.driver import CudaError, api, check
from eprt.gpu.group import RankGroup


class PeerAccessError(RuntimeError):
    """Some rank's GPU cannot read another's memory. Raised on all ranks alike."""


class PeerTensors:
    """The same list of tensors on every rank, readable from each. Construction is collective.

    PeerAccessError, on all ranks, where some GPU cannot read another's memory.

    group: the ranks.
    tensors: contiguous, on the current device; their number and sizes are equal on all ranks.
    """

    def __init__(self, group: RankGroup, tensors: Sequence[Tensor]):
        self._group = group
        self._opened: list[int] = []  # base addresses of the other ranks' allocations, as mapped here
        self._tensors = tensors  # kept alive: other ranks read them
        alone = group.size == 1
        exported = self._together(lambda: [] if alone else [_export(tensor) for tensor in tensors])
        self._exports = group.allgather((group.node, exported))  # of all ranks
        self._addresses = self._together(self._map_all)

    def address(self, rank: int, tensor: int) -> int:
        """Where a rank's tensor lies in the address space of this rank's GPU."""
        return self._addresses[rank][tensor]

    def close(self) -> None:
        """Collective while all ranks live: none frees what another still maps. Does not wait when one has died."""
        torch.cuda.synchronize()
        for pointer in self._opened:
            check(api().cuIpcCloseMemHandle(pointer), "unmapping another rank's tensors")
        self._opened = []
        if not self._group.lost_ranks():
            self._group.barrier()

    def _together(self, attempt: Callable[[], list]) -> list:
        """The result of `attempt` on this rank. PeerAccessError on all ranks when it fails on any."""
        result, problem = [], None
        try:
            result = attempt()
        except (CudaError, OSError, RuntimeError) as error:
            problem = f"[rank {self._group.rank}/{self._group.size}] {error}"
        if found := next((said for said in self._group.allgather(problem) if said), None):
            for pointer in self._opened:
                api().cuIpcCloseMemHandle(pointer)
            raise PeerAccessError(found)
        return result

    def _map_all(self) -> list[list[int]]:
        rank = self._group.rank
        if any(node != self._group.node for node, _ in self._exports):
            raise CudaError("ranks are on several nodes")
        return [
            [tensor.data_ptr() for tensor in self._tensors] if r == rank else self._map(r, exported)
            for r, (_, exported) in enumerate(self._exports)
        ]

    def _map(self, rank: int, exported: Sequence[tuple[bytes, int]]) -> list[int]:
        """Addresses of a rank's tensors. Several may lie in one allocation, which is opened once."""
        cu, base_of = api(), {}
        for handle, _ in exported:
            if handle not in base_of:
                ipc = cu.CUipcMemHandle()
                ipc.reserved = handle
                flags = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
                base_of[handle] = int(check(cu.cuIpcOpenMemHandle(ipc, flags), f"mapping tensors of rank {rank}"))
                self._opened.append(base_of[handle])
        return [base_of[handle] + offset for handle, offset in exported]


def _export(tensor: Tensor) -> tuple[bytes, int]:
    """(IPC handle of the allocation that the tensor lies in, byte offset of the tensor in it)"""
    cu, pointer = api(), tensor.data_ptr()
    base, _ = check(cu.cuMemGetAddressRange(pointer), "finding the allocation of a tensor")
    handle = check(cu.cuIpcGetMemHandle(int(base)), "exporting a tensor (expandable segments cannot be)")
    return bytes(handle.reserved), pointer - int(base)
