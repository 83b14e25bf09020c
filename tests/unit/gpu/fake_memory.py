"""The driver's virtual memory, faked: memories are memfds, whose inode tells which one lies where."""

import os
from types import SimpleNamespace
from typing import Any

OK = 0


class FakeDriver:
    """One process's. fails: the name of a call that gives an error."""

    def __init__(self, fails: str = ""):
        self.fails = fails
        self.ranges: dict[int, int] = {}  # address -> bytes
        self.mapped: dict[int, int] = {}  # address -> inode of the memory there
        self.handles: dict[int, int] = {}  # that are held -> descriptor
        self.readable: set[int] = set()  # addresses
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=OK)
        self.CUmemAccessDesc = self.CUmemLocation = self.CUmemAllocationProp = SimpleNamespace
        self.CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
        self.CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
        self.CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
        self.CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
        self.CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
        self._next = 1

    def inode_at(self, address: int) -> int:
        assert address in self.readable
        return self.mapped[address]

    def is_empty(self) -> bool:
        return not (self.ranges or self.mapped or self.handles)

    def _call(self, name: str, *values: Any) -> tuple:
        return (2, *(0 for _ in values)) if name == self.fails else (OK, *values)

    def cuGetErrorString(self, status: int) -> tuple:
        return OK, b"out of memory"

    def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> tuple:
        assert properties.location.type == 1
        return OK, 4096

    def cuMemAddressReserve(self, num_bytes: int, alignment: int, wanted: int, flags: int) -> tuple:
        self._next += 1
        self.ranges[self._next << 40] = num_bytes
        return OK, self._next << 40

    def cuMemAddressFree(self, address: int, num_bytes: int) -> tuple:
        assert self.ranges.pop(address) == num_bytes
        assert not any(address <= mapped < address + num_bytes for mapped in self.mapped)
        return (OK,)

    def _hold(self, fd: int) -> int:
        self._next += 1
        self.handles[self._next] = fd
        return self._next

    def cuMemCreate(self, num_bytes: int, properties: Any, flags: int) -> tuple:
        assert num_bytes % 4096 == 0 and properties.requestedHandleTypes == 1
        result = self._call("cuMemCreate", 0)
        return (OK, self._hold(os.memfd_create("memory"))) if result[0] == OK else result

    def cuMemImportFromShareableHandle(self, fd: int, kind: int) -> tuple:
        result = self._call("cuMemImportFromShareableHandle", 0)
        return (OK, self._hold(os.dup(fd))) if result[0] == OK else result

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple:
        result = self._call("cuMemExportToShareableHandle", 0)
        return (OK, os.dup(self.handles[handle])) if result[0] == OK else result

    def cuMemRelease(self, handle: int) -> tuple:
        os.close(self.handles.pop(handle))
        return (OK,)

    def _is_within_a_range(self, address: int, num_bytes: int) -> bool:
        return any(begin <= address and address + num_bytes <= begin + size for begin, size in self.ranges.items())

    def cuMemMap(self, address: int, num_bytes: int, offset: int, handle: int, flags: int) -> tuple:
        assert self._is_within_a_range(address, num_bytes) and address not in self.mapped
        self.mapped[address] = os.fstat(self.handles[handle]).st_ino
        return (OK,)

    def cuMemSetAccess(self, address: int, num_bytes: int, access: list[Any], count: int) -> tuple:
        assert (access[0].flags, access[0].location.type) == (3, 1)
        self.readable.add(address)
        return (OK,)

    def cuMemUnmap(self, address: int, num_bytes: int) -> tuple:
        del self.mapped[address]
        self.readable.discard(address)
        return (OK,)

    def cuMemsetD8(self, address: int, value: int, num_bytes: int) -> tuple:
        assert value == 0 and self._is_within_a_range(address, num_bytes)
        return self._call("cuMemsetD8")
