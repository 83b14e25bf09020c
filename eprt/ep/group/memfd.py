"""Shared memory without a name: memfd, reached by the other processes of the host through /proc.

Nothing can be left behind however a rank dies, and the size of /dev/shm (64 MB in many containers) is no bound.
"""

import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from eprt.ep.group.window import PAGE, AdjacentMemory, SharedWindow


def memfd_window(num_bytes: int, allgather: Callable[[Any], list[Any]]) -> SharedWindow:
    """A window in which each process contributes num_bytes of its own choice. allgather: among those processes."""
    own_fd = os.memfd_create("eprt")
    os.ftruncate(own_fd, max(num_bytes, PAGE))
    segments = [_map(*place) for place in allgather((os.getpid(), own_fd, num_bytes))]
    allgather(None)  # all have mapped all: the descriptor may go, the mappings keep the memory
    os.close(own_fd)
    return SharedWindow(segments)


def adjacent_memfd(num_bytes: int, rank: int, size: int, allgather: Callable[[Any], list[Any]]) -> AdjacentMemory:
    """Of the processes of one host, among which allgather works; rank is this one's number, of size. num_bytes: of
    each, a multiple of PAGE."""
    fd = -1
    if rank == 0:
        fd = os.memfd_create("eprt-adjacent")
        os.ftruncate(fd, size * num_bytes)
    first_pid, first_fd = allgather((os.getpid(), fd))[0]
    if rank:
        fd = _open(first_pid, first_fd)
    allgather(None)  # all have opened it
    memory = mmap.mmap(fd, size * num_bytes)
    return AdjacentMemory(np.frombuffer(memory, dtype=np.uint8).reshape(size, num_bytes), fd, 0)


def _map(pid: int, fd: int, num_bytes: int) -> np.ndarray:
    opened = _open(pid, fd)
    memory = mmap.mmap(opened, max(num_bytes, PAGE))
    os.close(opened)
    return np.frombuffer(memory, dtype=np.uint8)[:num_bytes]


def _open(pid: int, fd: int) -> int:
    path = f"/proc/{pid}/fd/{fd}"
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError as error:
        raise PermissionError(
            f"cannot map a peer's memory through {path}: {error}; run all ranks of a host as one user"
        ) from error
