"""A GPU's memory that lies in the host's: what is mapped can be read and written, and copies are made at once."""

import ctypes
import mmap
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eprt.gpu import driver, shared_allocation
from eprt.kv import gpu_pages, peer
from eprt.kv.gpu_pages import GpuPages
from eprt.ops.checksum import WIDE_WORDS, add_checksum, word_bytes
from tests.unit.gpu.fake_memory import OK, FakeDriver

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype, _libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
_PRIVATE, _SHARED, _FIXED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.MAP_SHARED, 0x10


class HostMemoryDriver(FakeDriver):
    """copied: each copy's description, as (from, from pitch, to, to pitch, bytes of a row, rows). streams: in which
    each was made."""

    def __init__(self):
        super().__init__()
        self.CUDA_MEMCPY2D = SimpleNamespace
        self.CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_UNIFIED=4)
        self.copied: list[tuple[int, int, int, int, int, int]] = []
        self.streams: list[int] = []
        self._sizes: dict[int, int] = {}  # of memories, by inode

    def cuCtxGetCurrent(self) -> tuple:
        return OK, 7

    def cuCtxSetCurrent(self, context: int) -> tuple:
        assert context == 7
        return (OK,)

    def cuMemCreate(self, num_bytes: int, properties: Any, flags: int) -> tuple:
        status, handle = super().cuMemCreate(num_bytes, properties, flags)
        if status == OK:
            os.ftruncate(self.handles[handle], num_bytes)
        return status, handle

    def cuMemAddressReserve(self, num_bytes: int, alignment: int, wanted: int, flags: int) -> tuple:
        address = _libc.mmap(None, num_bytes, 0, _PRIVATE, -1, 0)
        self.ranges[address] = num_bytes
        return OK, address

    def cuMemMap(self, address: int, num_bytes: int, offset: int, handle: int, flags: int) -> tuple:
        both = mmap.PROT_READ | mmap.PROT_WRITE
        _libc.mmap(address, num_bytes, both, _SHARED | _FIXED, self.handles[handle], 0)
        return super().cuMemMap(address, num_bytes, offset, handle, flags)

    def cuMemUnmap(self, address: int, num_bytes: int) -> tuple:
        _libc.mmap(address, num_bytes, 0, _PRIVATE | _FIXED, -1, 0)
        return super().cuMemUnmap(address, num_bytes)

    def cuMemcpy2DAsync(self, copy: Any, stream: int) -> tuple:
        assert copy.srcMemoryType == copy.dstMemoryType == 4
        self.streams.append(stream)
        source, pitch, into, into_pitch = copy.srcDevice, copy.srcPitch, copy.dstDevice, copy.dstPitch
        self.copied.append((source, pitch, into, into_pitch, copy.WidthInBytes, copy.Height))
        for row in range(copy.Height):
            ctypes.memmove(into + row * into_pitch, source + row * pitch, copy.WidthInBytes)
        return self._call("cuMemcpy2DAsync")


class FakeStream:
    """Whatever is launched on it has been done."""

    def __init__(self, *args: Any):
        self.num_waits, self.cuda_stream = 0, id(self)

    def synchronize(self) -> None:
        self.num_waits += 1

    def wait_event(self, event: Any) -> None: ...


class FakeEvent:
    def __init__(self, **options: Any): ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


def add_page_checksums(bytes_LPB: Tensor, page_N: Tensor, total_N: Tensor, first: int) -> None:
    """The slow twin of the operator."""
    size = word_bytes(bytes_LPB, WIDE_WORDS)
    for n, page in enumerate(page_N.tolist()):
        add_checksum(bytes_LPB[:, page].contiguous().view(-1), total_N[n : n + 1], first, (size,))


def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> HostMemoryDriver:
    """GpuPages and PeerReader on the CPU's tensors."""
    made, stream, zeros = HostMemoryDriver(), FakeStream(), torch.zeros
    for module in (driver, shared_allocation, gpu_pages, peer):
        monkeypatch.setattr(module, "api", lambda: made)
    for name, value in {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "current_stream": lambda *args: stream,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "set_stream": lambda stream: None,
        "synchronize": lambda *args: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **options: zeros(*args, **options))
    monkeypatch.setattr(gpu_pages.ops, "add_page_checksums", add_page_checksums)
    return made


def make_gpu_pages(shapes: Sequence[tuple[int, ...]]) -> GpuPages:
    """Of parts [layers, pages, ...] in bf16."""
    pages = GpuPages(torch.device("cpu"))
    for shape in shapes:
        assert not pages.allocate_part(shape, torch.bfloat16).any()
    return pages
