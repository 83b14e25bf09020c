"""GpuPages: the KV cache of a GPU, as ranks on GPUs of the same host read it. Knows nothing of owners.

Copies and checksums have a stream of their own beside that of the steps. Only they wait for steps, never the other way.
"""

import os
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from eprt import ops
from eprt.fd_desk import FdDesk
from eprt.gpu.driver import api, check
from eprt.gpu.shared_allocation import SharedAllocation
from eprt.kv.readable_cache import ReadableCache
from eprt.kv.reader import CachePart, PageSource, this_host

_AT_ONCE = 1024  # pages whose checksums are computed by one launch


class GpuPages(ReadableCache):
    """In memory that other processes map by descriptors, which a desk gives them. device: the current GPU."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device
        torch.zeros(1, device=device)  # makes the context
        self._context = check(api().cuCtxGetCurrent(), "asking for the context")
        self._stream = torch.cuda.Stream(device)
        self._desk = FdDesk()
        self._allocations: list[SharedAllocation] = []
        self._bytes_LPB: list[Tensor] = []
        self._copied = torch.cuda.Event(blocking=True)  # whoever waits for it sleeps
        numbers = {"size": (_AT_ONCE,), "dtype": torch.int64}
        self._page_N, self._sum_N = (torch.zeros(**numbers, device=device) for _ in range(2))
        self._host_page_N, self._host_sum_N = (torch.zeros(**numbers, pin_memory=True) for _ in range(2))

    @property
    def bytes_LPB(self) -> list[Tensor]:
        return self._bytes_LPB

    def allocate_part(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """RuntimeError where the GPU has no room for it."""
        num_layers, num_pages, *entry = shape
        page = num_layers, num_pages, prod(entry) * dtype.itemsize
        torch.cuda.empty_cache()  # what torch keeps of the weights' loading is not free for others
        allocation = SharedAllocation(self._device.index, prod(page))
        storage = torch._C._construct_storage_from_data_pointer(allocation.address, self._device, prod(page))
        flat = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (prod(page),), (1,))
        self._allocations.append(allocation)
        self._bytes_LPB.append(flat.view(page))
        self._parts.append(CachePart(self._desk.offer(allocation.take_fd()).number, page))
        self.checksums([0])  # compiles the kernel: no request waits for that
        return flat.view(dtype).view(*shape)

    @property
    def source(self) -> PageSource:
        return PageSource("peer", self._owner, os.getpid(), tuple(self._parts), this_host(), desk=self._desk.name)

    @torch.inference_mode()
    def checksums(self, pages: Sequence[int]) -> list[int]:
        """In the order of the current stream; sleeps until they are there."""
        sums: list[int] = []
        for begin in range(0, len(pages), _AT_ONCE):
            some = pages[begin : begin + _AT_ONCE]
            page_N, sum_N = self._page_N[: len(some)], self._sum_N[: len(some)]
            self._host_page_N[: len(some)] = torch.tensor(some)
            page_N.copy_(self._host_page_N[: len(some)], non_blocking=True)
            sum_N.zero_()
            first = 0
            for bytes_LPB in self._bytes_LPB:
                ops.add_page_checksums(bytes_LPB, page_N, sum_N, first)
                first += bytes_LPB.shape[0] * bytes_LPB.shape[2]
            self._host_sum_N[: len(some)].copy_(sum_N, non_blocking=True)
            self._copied.record()
            self._copied.synchronize()
            sums += self._host_sum_N[: len(some)].tolist()
        return sums

    def enter_thread(self) -> None:
        check(api().cuCtxSetCurrent(self._context), "entering a thread")
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._stream)

    def after_steps(self) -> Callable[[], None]:
        launched = torch.cuda.Event()
        launched.record(torch.cuda.current_stream(self._device))
        return lambda: self._stream.wait_event(launched)

    def close(self) -> None:
        """Who has mapped the memory keeps it."""
        torch.cuda.synchronize(self._device)
        self._desk.close()
        self._bytes_LPB.clear()
        for allocation in self._allocations:
            allocation.close()
        self._allocations.clear()
