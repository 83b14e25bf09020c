"""NvshmemMemory: SymmetricMemory among ranks of several nodes, in NVSHMEM's heap."""

from typing import Any

import torch

from eprt.gpu.driver import CudaError, api, check
from eprt.gpu.group import RankGroup
from eprt.gpu.nvshmem import Nvshmem
from eprt.gpu.symmetric import SymmetricMemory


class NvshmemMemory(SymmetricMemory):
    """As SymmetricMemory, but ranks may be on several nodes: copies of this node's ranks are mapped, others are reached
    by kernels that call NVSHMEM (NvshmemKernel). peer_ptr of such a rank is 0.

    one_host: all nodes are virtual ones of this host.
    """

    _crosses_nodes = True

    def __init__(self, group: RankGroup, num_bytes: int, one_host: bool):
        self._one_host = one_host
        self.nvshmem: Nvshmem | None = None  # until close()
        super().__init__(group, num_bytes)

    def _problem(self, device: int, peers: list[tuple[str, int, int]], here: dict[str, int]) -> str | None:
        found = super()._problem(device, peers, here) or Nvshmem.problem(self.group, self.num_bytes)
        # All ranks come here, whatever they have found so far.
        releases = self.group.allgather(None if found else Nvshmem.release())
        others = [(rank, release) for rank, release in enumerate(releases) if release not in (None, releases[0])]
        if found or releases[0] is None or not others:
            return found
        return f"[rank 0/{self.group.size}] has NVSHMEM {releases[0]}, rank {others[0][0]} has {others[0][1]}"

    def _allocate(self) -> Any:
        """Collective: whatever can go wrong on one rank alone was looked at by _problem."""
        self.nvshmem = Nvshmem.join(self.group, self.num_bytes, self._one_host)
        self._own = self.nvshmem.allocate(self.num_bytes)
        check(api().cuMemsetD8(self._own, 0, self.num_bytes), f"{self._where} clearing symmetric memory")
        torch.cuda.synchronize()

    def _map(self, handles: list[Any]) -> list[int]:
        nodes = self.group.allgather(self.group.node)
        return [self._peer_address(rank) if node == self.group.node else 0 for rank, node in enumerate(nodes)]

    def _peer_address(self, rank: int) -> int:
        assert self.nvshmem is not None
        address = self._own if rank == self.group.rank else self.nvshmem.address_of(self._own, rank)
        if address is None:
            raise CudaError(
                f"{self._where} NVSHMEM does not map the memory of rank {rank}, which is on the same node; the two "
                "GPUs need peer access (`nvidia-smi topo -p2p r`), and NVSHMEM_DISABLE_P2P must not be set"
            )
        return address

    def _unmap(self) -> None:
        """NVSHMEM does, as it frees."""

    def _free(self) -> None:
        if self.nvshmem is not None and not self.group.lost_ranks():
            self.nvshmem.free(self._own)
            self.nvshmem.leave()
        self.nvshmem = None
