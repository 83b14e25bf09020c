"""Nvshmem: NVIDIA's library for memory of other ranks' GPUs, on this host or beyond a network, by ctypes.

A process joins once, with all ranks of its group; they meet by NVSHMEM's unique id, which the group hands on. Knows
byte counts and addresses, nothing of what lies there.
"""

import ctypes
import functools
import importlib.util
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eprt import env
from eprt.gpu.driver import CudaError
from eprt.gpu.group import RankGroup

_WITH_UNIQUE_ID = 1 << 3  # NVSHMEMX_INIT_WITH_UNIQUEID
_UNIQUE_ID_BYTES = 128
_GRANULARITY = 512 << 20  # NVSHMEM_CUMEM_GRANULARITY: the heap grows by so much
_OWN_BYTES = 256 << 20  # what NVSHMEM keeps in the heap for itself: teams, at most


class _UniqueIdArgs(ctypes.Structure):
    """nvshmemx_uniqueid_args_t."""

    _fields_ = (("version", ctypes.c_int), ("id", ctypes.c_void_p), ("rank", ctypes.c_int), ("ranks", ctypes.c_int))


class _InitArgs(ctypes.Structure):
    """nvshmemx_init_args_t."""

    _fields_ = (("version", ctypes.c_int), ("unique_id", _UniqueIdArgs), ("content", ctypes.c_char * 96))


class _InitAttributes(ctypes.Structure):
    """nvshmemx_init_attr_t."""

    _fields_ = (("version", ctypes.c_int), ("mpi_comm", ctypes.c_void_p), ("args", _InitArgs))


def _version_of(kind: type[ctypes.Structure]) -> int:
    """By which the library knows a struct: 1, and its size."""
    return (1 << 16) + ctypes.sizeof(kind)


@dataclass(frozen=True)
class NvshmemFiles:
    """NVSHMEM as its wheel has it."""

    folder: Path

    @property
    def host_library(self) -> Path:
        return self.folder / "lib" / "libnvshmem_host.so.3"

    @property
    def device_library(self) -> Path:
        return self.folder / "lib" / "libnvshmem_device.a"

    @property
    def include(self) -> Path:
        return self.folder / "include"

    @functools.cached_property
    def release(self) -> str:
        """Of the headers, such as 3.4.5."""
        text = (self.include / "non_abi" / "nvshmem_version.h").read_text()
        parts = [re.search(rf"NVSHMEM_VENDOR_{part}_VERSION (\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
        return ".".join(part.group(1) for part in parts if part)


def nvshmem_files() -> NvshmemFiles:
    """ImportError, with the remedy, where the wheel is missing."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        files = NvshmemFiles(Path(root) / "nvshmem")
        if files.host_library.exists():
            return files
    raise ImportError("the nvshmem wire needs NVSHMEM: pip install nvidia-nvshmem-cu13 (or -cu12, as torch's CUDA)")


@functools.cache
def _library(files: NvshmemFiles) -> ctypes.CDLL:
    """Its functions, declared. OSError or ImportError where it is not what it should be."""
    library = ctypes.CDLL(str(files.host_library), mode=ctypes.RTLD_GLOBAL)
    for name in ("nvshmem_malloc", "nvshmem_ptr"):
        getattr(library, name).restype = ctypes.c_void_p
    library.nvshmem_malloc.argtypes = [ctypes.c_size_t]
    library.nvshmem_ptr.argtypes = [ctypes.c_void_p, ctypes.c_int]
    for name in ("nvshmem_free", "nvshmemx_culibrary_init", "nvshmemx_culibrary_finalize"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    version = (ctypes.c_int * 3)()
    library.nvshmemx_vendor_get_version_info(*(ctypes.byref(version, 4 * i) for i in range(3)))
    if (loaded := ".".join(map(str, version))) != files.release:
        raise ImportError(
            f"{files.host_library} is NVSHMEM {loaded}, its headers are of {files.release}; reinstall the wheel"
        )
    return library


class Nvshmem:
    """The ranks of a group as NVSHMEM's processing elements. join() makes it; leave() ends it, both collective."""

    _joined: "Nvshmem | None" = None

    def __init__(self, group: RankGroup, files: NvshmemFiles, heap_bytes: int, one_host: bool):
        self._group, self._users = group, 0
        self._where = f"[rank {group.rank}/{group.size}]"
        env.prepare_nvshmem(heap_bytes, one_host)
        self._library = _library(files)
        own_id = ctypes.create_string_buffer(_UNIQUE_ID_BYTES)
        struct.pack_into("<i", own_id, 0, (1 << 16) + _UNIQUE_ID_BYTES)
        if group.rank == 0:
            self._check(self._library.nvshmemx_get_uniqueid(own_id), "finding an address to meet at")
        # The library reads it during the next call.
        unique_id = ctypes.create_string_buffer(group.allgather(own_id.raw)[0], _UNIQUE_ID_BYTES)
        attributes = _InitAttributes(version=_version_of(_InitAttributes))
        attributes.args.version = _version_of(_InitArgs)
        attributes.args.unique_id.version = _version_of(_UniqueIdArgs)
        call = self._library.nvshmemx_set_attr_uniqueid_args
        self._check(call(group.rank, group.size, unique_id, ctypes.byref(attributes)), "taking the unique id")
        call = self._library.nvshmemx_hostlib_init_attr
        self._check(call(_WITH_UNIQUE_ID, ctypes.byref(attributes)), "starting; NVSHMEM_DEBUG=INFO says more")

    @staticmethod
    def problem(group: RankGroup, num_bytes: int) -> str | None:
        """Why this rank could not join, or could not allocate so much. Not collective: NVSHMEM itself ends the process
        where some of it goes wrong, so all is looked at before."""
        where = f"[rank {group.rank}/{group.size}]"
        try:
            _library(nvshmem_files())
        except (ImportError, OSError) as error:
            return f"{where} {error}"
        joined = Nvshmem._joined
        if joined is not None and (joined._group.rank, joined._group.size) != (group.rank, group.size):
            return f"{where} this process is rank {joined._group.rank}/{joined._group.size} in NVSHMEM already"
        free, _ = torch.cuda.mem_get_info()
        grows = -(-(num_bytes + _OWN_BYTES) // _GRANULARITY) * _GRANULARITY
        if grows > free:
            return f"{where} NVSHMEM would take {grows >> 20} MiB of this GPU, of which {free >> 20} MiB are free"
        return None

    @staticmethod
    def release() -> str:
        return nvshmem_files().release

    @staticmethod
    def join(group: RankGroup, heap_bytes: int, one_host: bool) -> "Nvshmem":
        """Collective where the process has not joined yet. heap_bytes: of the first allocation."""
        if Nvshmem._joined is None:
            Nvshmem._joined = Nvshmem(group, nvshmem_files(), heap_bytes + _OWN_BYTES, one_host)
        Nvshmem._joined._users += 1
        return Nvshmem._joined

    def leave(self) -> None:
        """Collective for the last user, while all ranks live; with lost ranks it does not wait for them."""
        self._users -= 1
        if self._users == 0 and not self._group.lost_ranks():
            Nvshmem._joined = None
            self._library.nvshmemx_hostlib_finalize()

    def allocate(self, num_bytes: int) -> int:
        """The address here of symmetric memory. Collective."""
        address = self._library.nvshmem_malloc(num_bytes)
        if not address:
            raise CudaError(
                f"{self._where} NVSHMEM has no {num_bytes} B of symmetric memory left; raise NVSHMEM_SYMMETRIC_SIZE"
            )
        return address

    def free(self, address: int) -> None:
        """Collective."""
        self._library.nvshmem_free(address)

    def address_of(self, address: int, rank: int) -> int | None:
        """Where a rank's copy of symmetric memory is mapped here; None: it can be reached by NVSHMEM's calls alone."""
        return self._library.nvshmem_ptr(address, rank)

    def attach(self, cuda_library: Any) -> None:
        """Tells kernels that call NVSHMEM where everything is. Before the first is launched or recorded."""
        self._check(self._library.nvshmemx_culibrary_init(int(cuda_library)), "attaching kernels")

    def detach(self, cuda_library: Any) -> None:
        """Before the kernels are unloaded."""
        self._check(self._library.nvshmemx_culibrary_finalize(int(cuda_library)), "detaching kernels")

    def _check(self, status: int, what: str) -> None:
        if status:
            raise CudaError(f"{self._where} NVSHMEM, {what}: status {status}")
