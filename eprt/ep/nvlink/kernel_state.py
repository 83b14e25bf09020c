"""KernelState: what the kernels of both modes keep on one rank's GPU.

The symmetric heap, the mask of ranks that are not waited for, the epochs, the counters, and the words in host memory in
which a kernel reports a failure.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.rank_mask import RankMask
from eprt.ep.nvlink.structs import Deadline, Stats, deadline_ns
from eprt.gpu.elastic_memory import ElasticMemory
from eprt.gpu.launch import Launch
from eprt.gpu.symmetric import HostWords, SymmetricMemory

TICKETS_PER_CALL = 1024  # kTicketsPerCall: of a kind whose thread blocks count


@dataclass(frozen=True)
class KernelTotals:
    """What the kernels count, int64 on the GPU. R ranks."""

    wait_ns: Tensor  # [2, 2, R]: dispatch, combine; sum, maximum
    tokens: Tensor  # [2, R]: sent, received
    calls: Tensor  # [1]
    compute_ns: Tensor  # [1]: from the end of a dispatch to its combine
    blocked_ns: Tensor  # [1]: the longest wait of each call, added up

    @staticmethod
    def zeros(num_ranks: int) -> "KernelTotals":
        sizes = ((2, 2, num_ranks), (2, num_ranks), (1,), (1,), (1,))
        return KernelTotals(*(torch.zeros(size, dtype=torch.int64, device="cuda") for size in sizes))

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of struct Stats (csrc/cuda/waits.cuh)."""
        return self.wait_ns, self.tokens, self.calls, self.compute_ns, self.blocked_ns


@dataclass(frozen=True)
class KernelOptions:
    """How kernels wait, and how they are compiled."""

    timeout_s: float  # deadline of every wait, until set_deadline()
    mask: RankMask | None = None  # the caller's; default: one of its own
    stats: bool = True  # kernels count (KernelTotals)
    exact: bool = False  # normal mode: as EPConfig.exact_combine
    profile: bool = False  # low latency: they record when they pass each stage


class KernelState:
    """Construction and close() are collective.

    num_bytes: of the symmetric heap.
    tickets_per_call: of each kind of call that has epochs of its own, what one call adds to its ticket.
    by_nvlink: as SymmetricMemory's.
    """

    def __init__(
        self,
        group: EPGroup,
        num_bytes: int,
        tickets_per_call: Sequence[int],
        options: KernelOptions,
        by_nvlink: bool = False,
    ):
        self.group, self.options, self.timeout_s = group, options, options.timeout_s
        self.memory = self._new_memory(num_bytes, by_nvlink)
        self.rank_mask = RankMask(group.size) if options.mask is None else options.mask
        self.mask = self.rank_mask.on_gpu
        self.totals = KernelTotals.zeros(group.size)
        self.failure, self.waiting = HostWords(4), HostWords(2)
        # What a call adds to the ticket of its kind.
        self._per_call = torch.tensor(tickets_per_call, dtype=torch.int64)
        self._ticket = torch.zeros(len(tickets_per_call), dtype=torch.int64, device="cuda")
        if not group.view.is_full:
            self.rank_mask.write([not each for each in group.view.alive])
        self._stream = functools.partial(torch._C._cuda_getCurrentRawStream, torch.cuda.current_device())

    def _new_memory(self, num_bytes: int, by_nvlink: bool) -> SymmetricMemory:
        memory_type = SymmetricMemory if self.group.fd_desk() is None else ElasticMemory
        return memory_type(self.group, num_bytes, by_nvlink)

    def _context_fields(self, heap: ctypes.Structure) -> dict:
        """Fields that struct Context has in both modes."""
        words = self.rank_mask.told.device_ptr, self.failure.device_ptr, self.waiting.device_ptr
        return {
            "peer": tuple(self.memory.peer_ptr),
            "heap": heap,
            "deadline": Deadline(deadline_ns(self.timeout_s), self.mask.data_ptr(), *words),
            "stats": Stats(*(total.data_ptr() for total in self.totals.tensors())),
            "ticket": self._ticket.data_ptr(),
            "rank": self.group.rank,
        }

    def _launches(self) -> Sequence[Launch]:
        """All that have a Context of their own."""
        raise NotImplementedError

    def set_deadline(self, timeout_s: float) -> None:
        """Of every wait of launches from now on."""
        self.timeout_s = timeout_s
        for launch in self._launches():
            launch.params.context.deadline.timeout_ns = deadline_ns(timeout_s)

    def _meet(self) -> None:
        """Waits for the GPU and all ranks, so that no rank writes into a heap that its owner is still clearing."""
        torch.cuda.synchronize()
        self.group.barrier()

    def readmit(self) -> None:
        """Clears the mask and counts on from the largest epochs of any rank. Collective, with nothing under way."""
        torch.cuda.synchronize()
        everyone = self.group.allgather(self._ticket.tolist())
        largest = [max(tickets) for tickets in zip(*everyone)]
        self._ticket.copy_(torch.tensor(largest, dtype=torch.int64, device="cuda"))
        self.rank_mask.take_back()
        self._meet()

    def halt(self) -> None:
        """Masks all other ranks, so that whatever waits for one ends at once. From any thread."""
        self.rank_mask.write([rank != self.group.rank for rank in range(self.group.size)])

    @property
    def num_calls(self) -> int:
        """That this rank has launched of any kind, at least; with nothing under way."""
        return int((self._ticket.cpu() // self._per_call).max())

    def restart(self, num_calls: int, alive: Sequence[bool]) -> None:
        """With nothing under way: counts on from so many calls of each kind, and masks the ranks that are not alive."""
        self.memory.remap(alive)
        self._ticket.copy_(self._per_call * num_calls)
        self.rank_mask.write([not each for each in alive])
        self.failure.words[0] = 0
        torch.cuda.synchronize()

    def close(self) -> None:
        """Collective while all ranks live; with lost ranks it does not wait for them."""
        self.memory.close()
        self.failure.close()
        self.waiting.close()
        if self.options.mask is None:
            self.rank_mask.close()
