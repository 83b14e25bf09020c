"""CachePages: the KV cache of a CPU rank, as other ranks read it. Knows nothing of owners."""

import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eprt.kv.page_server import KVPageServer
from eprt.kv.readable_cache import ReadableCache
from eprt.kv.reader import CachePart, PageSource, this_host
from eprt.ops import native


class CachePages(ReadableCache):
    """In memfds, which other processes of the host can map."""

    def __init__(self):
        super().__init__()
        self._bytes_LPB: list[np.ndarray] = []
        self._addresses: list[int] = []  # where each part begins: asking numpy for each page takes as long as its sum
        self._reader, self._server, self._nixl = "memory", None, None  # for other hosts
        self._ops = native.load()

    @property
    def bytes_LPB(self) -> list[np.ndarray]:
        return self._bytes_LPB

    def allocate_part(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory is taken as it is written."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        fd = os.memfd_create("eprt-kv")
        os.ftruncate(fd, num_bytes)
        part = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
        self.add_part(part.view(shape[0], shape[1], -1).numpy(), fd)
        return part.view(dtype).view(*shape)

    def add_part(self, bytes_LPB: np.ndarray, fd: int, offset: int = 0) -> None:
        """A further part that is there already: shared memory of the file `fd`, which stays open, from a multiple of
        4096 on."""
        self._bytes_LPB.append(bytes_LPB)
        self._addresses.append(bytes_LPB.ctypes.data)
        self._parts.append(CachePart(fd, bytes_LPB.shape, offset))

    def open_to_hosts(self, host: str, reader: str) -> None:
        if reader == "nixl":
            from eprt.kv.nixl import NixlPages

            self._nixl = NixlPages(self.bytes_LPB)
        agent = None if self._nixl is None else self._nixl.description
        self._server = KVPageServer(self.bytes_LPB, host, self._owner, agent)
        self._reader = reader

    @property
    def source(self) -> PageSource:
        address = None if self._server is None else ("", self._server.port)
        return PageSource(self._reader, self._owner, os.getpid(), tuple(self._parts), this_host(), address)

    def checksums(self, pages: Sequence[int]) -> list[int]:
        return [self.checksum(page) for page in pages]

    def checksum(self, page: int) -> int:
        """Of the page's bytes in all layers and parts."""
        value = 0
        for begin, (num_layers, num_pages, num_bytes) in zip(self._addresses, (part.shape for part in self._parts)):
            at, stride = begin + page * num_bytes, num_pages * num_bytes
            value = self._ops.kv_page_checksum(at, num_layers, stride, num_bytes, value)
        return value
