"""SharedAllocation: GPU memory that other processes map by a descriptor; AddressRange: where they do.

The driver's virtual memory: addresses are reserved once, and what lies there may change. Knows nothing of ranks.
"""

import os
from typing import Any

from eprt.gpu.driver import CudaError, api, check


class AddressRange:
    """Addresses of a GPU, with or without memory behind them.

    device: number of the GPU.
    num_bytes: at least so many.
    whole: an empty range, of which this is a part, instead of addresses of its own; closed after its parts.
    offset: bytes from the beginning of the whole, a multiple of granularity().
    """

    def __init__(self, device: int, num_bytes: int, whole: "AddressRange | None" = None, offset: int = 0):
        self._device, unit, self._is_part = device, granularity(device), whole is not None
        self.num_bytes = -(-num_bytes // unit) * unit
        if whole is None:
            what = "reserving addresses of a GPU"
            self.address = int(check(api().cuMemAddressReserve(self.num_bytes, 0, 0, 0), what))
        else:
            self.address = whole.address + offset
        self._is_mapped = False

    def map(self, handle: Any) -> None:
        """Memory of the same size, which must be unmapped first if there is some. The handle stays the caller's."""
        cu, access = api(), api().CUmemAccessDesc()
        access.location = _location(self._device)
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(cu.cuMemMap(self.address, self.num_bytes, 0, handle, 0), "mapping GPU memory")
        self._is_mapped = True
        check(cu.cuMemSetAccess(self.address, self.num_bytes, [access], 1), "access to GPU memory")

    def map_shared(self, fd: int) -> None:
        """Memory of another process: the descriptor is that of its SharedAllocation, and stays the caller's."""
        cu = api()
        kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = check(cu.cuMemImportFromShareableHandle(fd, kind), "importing another process's GPU memory")
        try:
            self.map(handle)
        finally:
            check(cu.cuMemRelease(handle), "releasing a handle")  # the mapping keeps the memory

    def unmap(self) -> None:
        """The addresses stay reserved. Nothing without memory."""
        if self._is_mapped:
            check(api().cuMemUnmap(self.address, self.num_bytes), "unmapping GPU memory")
            self._is_mapped = False

    def close(self) -> None:
        self.unmap()
        if not self._is_part:
            check(api().cuMemAddressFree(self.address, self.num_bytes), "freeing addresses of a GPU")


class SharedAllocation:
    """Zeroed. It lives until the last process that maps it has unmapped it or ended.

    device, num_bytes: as of AddressRange.
    addresses: where it lies, its own from now on; None: anywhere.
    """

    def __init__(self, device: int, num_bytes: int, addresses: AddressRange | None = None):
        cu, properties = api(), _properties(device)
        self._range = AddressRange(device, num_bytes) if addresses is None else addresses
        size = self._range.num_bytes
        try:
            handle = check(cu.cuMemCreate(size, properties, 0), f"{size} B of GPU memory")
        except CudaError:
            self._range.close()
            raise
        try:
            self._range.map(handle)
            check(cu.cuMemsetD8(self.address, 0, size), "clearing GPU memory")
            kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            self._fd = int(check(cu.cuMemExportToShareableHandle(handle, kind, 0), "exporting GPU memory"))
        except CudaError:
            self._range.close()
            raise
        finally:
            check(cu.cuMemRelease(handle), "releasing a handle")

    @property
    def address(self) -> int:
        return self._range.address

    def take_fd(self) -> int:
        """A descriptor of the memory, the caller's."""
        return os.dup(self._fd)

    def close(self) -> None:
        os.close(self._fd)
        self._range.close()


def _location(device: int) -> Any:
    location = api().CUmemLocation()
    location.type, location.id = api().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, device
    return location


def _properties(device: int) -> Any:
    """Of memory that is shared by descriptors."""
    cu, properties = api(), api().CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties.location = _location(device)
    return properties


def granularity(device: int) -> int:
    """Memory is mapped in multiples of so many bytes."""
    option = api().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return int(check(api().cuMemGetAllocationGranularity(_properties(device), option), "asking for the size of pages"))
