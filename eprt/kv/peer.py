"""The reader `peer`: caches of GPUs of one host. Copy engines read them, over NVLink or within a GPU; no SM is needed.

The owner's memory is mapped by descriptors, which its FdDesk gives. It stays readable after its owner has been killed,
until it is unmapped here; so a copy under way ends, and is whole. A call copies pages that lie side by side, in all
layers: a row of the copy is their bytes in one layer. One stream has all copies: sharing them among four took longer.
Knows nothing of requests.
"""

import os
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from eprt.fd_desk import FdDesk, FdTicket
from eprt.gpu.driver import CudaError, api, check
from eprt.gpu.shared_allocation import AddressRange
from eprt.kv.page_runs import PageRun, page_runs
from eprt.kv.reader import CachePart, PageReader, PageSource, check_pages

_MOST_PITCH = (1 << 31) - 1  # bytes between two rows of one copy (CU_DEVICE_ATTRIBUTE_MAX_PITCH)


class PeerReader(PageReader):
    """Maps the memory when it is made, for the current GPU. OSError where that cannot be."""

    def __init__(self, source: PageSource):
        self._source = source
        self._ranges: list[AddressRange] = []  # of each part
        try:
            for part in source.parts:
                self._ranges.append(AddressRange(torch.cuda.current_device(), prod(part.shape)))
                fd = FdDesk.fetch(FdTicket(source.desk, part.fd))
                try:
                    self._ranges[-1].map_shared(fd)
                finally:
                    os.close(fd)
        except (CudaError, OSError) as error:
            self._unmap()
            raise OSError(f"the pages of process {source.pid} cannot be mapped on this GPU: {error}") from None

    def read_pages(self, from_pages: Sequence[int], into_LPB: Sequence[Tensor], to_pages: Sequence[int]) -> None:
        check_pages(self._source, from_pages, into_LPB, to_pages)
        runs, stream = page_runs(from_pages, to_pages), torch.cuda.current_stream()
        try:
            for part, addresses, into in zip(self._source.parts, self._ranges, into_LPB, strict=True):
                for copy in copies_of_part(part, addresses.address, into.shape[1], into.data_ptr(), runs):
                    check(api().cuMemcpy2DAsync(copy, stream.cuda_stream), "copying pages between GPUs")
        except CudaError as error:
            stream.synchronize()  # what was begun still writes into the pages
            raise OSError(f"the pages of process {self._source.pid} cannot be read: {error}") from None

    def close(self) -> None:
        torch.cuda.current_stream().synchronize()
        self._unmap()

    def _unmap(self) -> None:
        for addresses in self._ranges:
            addresses.close()
        self._ranges.clear()


def copies_of_part(part: CachePart, begin: int, num_into: int, into: int, runs: Sequence[PageRun]) -> Iterator[Any]:
    """The driver's descriptions of the copies: each is the same object, which changes when the next one is asked for.
    begin, into: addresses of the two caches' parts. num_into: pages of the second."""
    num_layers, num_from, num_bytes = part.shape
    pitch, into_pitch = num_from * num_bytes, num_into * num_bytes
    # Where layers lie too far apart for the rows of one copy, each layer has one of its own.
    rows = num_layers if max(pitch, into_pitch) <= _MOST_PITCH else 1
    copy = api().CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = api().CUmemorytype.CU_MEMORYTYPE_UNIFIED
    copy.Height = rows
    for run in runs:
        width = run.num_pages * num_bytes
        copy.WidthInBytes = width
        copy.srcPitch, copy.dstPitch = (pitch, into_pitch) if rows > 1 else (width, width)
        for layer in range(0, num_layers, rows):
            copy.srcDevice = begin + layer * pitch + run.from_page * num_bytes
            copy.dstDevice = into + layer * into_pitch + run.to_page * num_bytes
            yield copy
