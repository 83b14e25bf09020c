"""The KV pages of CPU ranks numbered as those of GPUs are: each rank's own first (eprt/gpu/adjacent_memory.py).

The same shared memory as ever, which each rank maps in another order. Knows nothing of what lies there.
"""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch

from eprt.engine import team_pages
from eprt.engine.team_pages import TeamPages
from eprt.ep.group.group import EPGroup
from eprt.ep.group.window import PAGE
from eprt.kv.pages import CachePages
from eprt.ops.kv_format import KVFormat

_MAP_FIXED = 0x10


def rotated(
    num_layers: int, num_pages: int, page_size: int, entry: KVFormat, group: EPGroup, readable: CachePages | None = None
) -> TeamPages:
    """As TeamPages.on_cpus."""
    page_bytes = page_size * entry.width * entry.dtype.itemsize
    per_rank = team_pages._rounded(num_layers * num_pages, page_bytes, PAGE)
    num_bytes = per_rank * page_bytes
    memory = group.adjacent_memory(num_bytes)
    row = mmap.mmap(-1, group.size * num_bytes)
    bytes_of_row = np.frombuffer(row, dtype=np.uint8)
    shift_N = []
    for rank in range(group.size):
        place = (rank - group.rank) % group.size
        shift_N.append(place * per_rank)
        _map(bytes_of_row.ctypes.data + place * num_bytes, num_bytes, memory.fd, memory.offset + rank * num_bytes)
    memory.close_file()
    whole = torch.from_numpy(bytes_of_row).view(entry.dtype).view(-1, page_size, entry.width)
    return TeamPages(team_pages._layers(whole, num_layers, num_pages, 0), 0, shift_N)


def _map(address: int, num_bytes: int, fd: int, offset: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    assert libc.mmap(address, num_bytes, *how, fd, offset) == address, ctypes.get_errno()


@contextmanager
def rotated_pages() -> Iterator[None]:
    """Inside, pages are numbered so."""
    with patch.object(TeamPages, "on_cpus", staticmethod(rotated)):
        yield
