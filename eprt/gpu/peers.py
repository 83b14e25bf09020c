"""PeerTensors: tensors of other ranks' GPUs, mapped into this process, as they were allocated.

SymmetricMemory allocates; this maps what torch has allocated already, whole models' weights if need be. A mapping takes
address space, no memory.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eprt.gpu.driver import CudaError, api, check
from eprt.gpu.symmetric import Group


class UnreachableError(RuntimeError):
    """Some rank's GPU cannot read another's memory. Raised on all ranks alike."""


class PeerTensors:
    """Collective: tensors of the same number and sizes on every rank, contiguous, on its current device.

    Raises UnreachableError.
    """

    def __init__(self, group: Group, tensors: Sequence[Tensor]):
        self._group, self._opened = group, []
        self._tensors = tensors  # theirs are read as long as this lives
        alone = group.size == 1
        exported = self._or_unreachable(lambda: [] if alone else [_export(tensor) for tensor in tensors])
        self._everyones = group.allgather((group.node, exported))
        self._addresses = self._or_unreachable(self._map_all)

    def address(self, rank: int, tensor: int) -> int:
        """Of a rank's tensor, on this rank's GPU."""
        return self._addresses[rank][tensor]

    def close(self) -> None:
        """Collective while all ranks live: nobody frees what another still maps. Does not wait when one has died."""
        torch.cuda.synchronize()
        for pointer in self._opened:
            check(api().cuIpcCloseMemHandle(pointer), "unmapping another rank's tensors")
        self._opened = []
        if not self._group.lost_ranks():
            self._group.barrier()

    def _or_unreachable(self, attempt: Callable[[], list]) -> list:
        """What it gives, unless it fails on any rank."""
        result, problem = [], None
        try:
            result = attempt()
        except (CudaError, OSError, RuntimeError) as error:
            problem = f"[rank {self._group.rank}/{self._group.size}] {error}"
        if found := next((said for said in self._group.allgather(problem) if said), None):
            for pointer in self._opened:
                api().cuIpcCloseMemHandle(pointer)
            raise UnreachableError(found)
        return result

    def _map_all(self) -> list[list[int]]:
        rank = self._group.rank
        if any(node != self._group.node for node, _ in self._everyones):
            raise CudaError("ranks are on several nodes")
        return [
            [tensor.data_ptr() for tensor in self._tensors] if r == rank else self._map(r, exported)
            for r, (_, exported) in enumerate(self._everyones)
        ]

    def _map(self, rank: int, exported: Sequence[tuple[bytes, int]]) -> list[int]:
        """Several tensors may lie in one allocation, which is opened once."""
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
    """The allocation that the tensor lies in, and where in it."""
    cu, pointer = api(), tensor.data_ptr()
    base, _ = check(cu.cuMemGetAddressRange(pointer), "finding the allocation of a tensor")
    handle = check(cu.cuIpcGetMemHandle(int(base)), "exporting a tensor (expandable segments cannot be)")
    return bytes(handle.reserved), pointer - int(base)
