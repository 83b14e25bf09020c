"""Shared memory without a name: memfd, reached by the other processes of the host through /proc.

Nothing can be left behind however a rank dies, and the size of /dev/shm (64 MB in many containers) is no bound.
"""

import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from eprt.ep.group.window import PAGE, SharedWindow


def memfd_window(num_bytes: int, allgather: Callable[[Any], list[Any]]) -> SharedWindow:
    """A window in which each process contributes num_bytes of its own choice. allgather: among those processes."""
    own_fd = os.memfd_create("eprt")
    os.ftruncate(own_fd, max(num_bytes, PAGE))
    segments = [_map(*place) for place in allgather((os.getpid(), own_fd, num_bytes))]
    allgather(None)  # all have mapped all: the descriptor may go, the mappings keep the memory
    os.close(own_fd)
    return SharedWindow(segments)


def _map(pid: int, fd: int, num_bytes: int) -> np.ndarray:
    path = f"/proc/{pid}/fd/{fd}"
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), max(num_bytes, PAGE))
    except PermissionError as error:
        raise PermissionError(
            f"cannot map a peer's memory through {path}: {error}; run all ranks of a host as one user"
        ) from error
    return np.frombuffer(memory, dtype=np.uint8)[:num_bytes]
