"""TeamPages: the KV pages of all ranks as one tensor for each layer, so that a page number leads to any rank's page.

Rank after rank, layer after layer: a layer's page is as far behind its rank's first page in all layers, and one tensor
per layer, of all that follows, has the pages of all ranks.

On CPUs the ranks' pages are one piece of shared memory, and a page has the same number everywhere. On GPUs each rank's
are memory of its own GPU, which the others map (gpu/adjacent_memory.py), and numbers begin with the rank's own pages: a
page of another rank has another number there. Knows nothing of who owns pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
from torch import Tensor

from eprt.ep.group.group import EPGroup
from eprt.ep.group.window import PAGE
from eprt.fd_desk import FdDesk
from eprt.gpu.adjacent_memory import AdjacentGpuMemory
from eprt.gpu.driver import CudaError
from eprt.gpu.shared_allocation import granularity
from eprt.kv.pages import CachePages
from eprt.layers.layer_cache import LayerCache
from eprt.ops.kv_format import KVFormat

_MOST_ENTRIES = 2**31 - 1  # that kernels count


@dataclass(frozen=True, eq=False)
class TeamPages:
    """One rank's view of them."""

    layers: Sequence[LayerCache]
    first_page: int  # the number of this rank's first page in the layers
    shift_N: Sequence[int]  # by rank: added to the number that a page has there, the number that it has here
    memory: AdjacentGpuMemory | None = None  # of GPUs
    desk: FdDesk | None = None  # over which they got it, where their group has none

    @staticmethod
    def on_cpus(
        num_layers: int,
        num_pages: int,
        page_size: int,
        entry: KVFormat,
        group: EPGroup,
        readable: CachePages | None = None,
    ) -> "TeamPages":
        """num_pages: of each layer, the last one for padding. readable: gets this rank's as a part. Collective."""
        page_bytes = page_size * entry.width * entry.dtype.itemsize
        per_rank = _rounded(num_layers * num_pages, page_bytes, PAGE)
        memory = group.adjacent_memory(per_rank * page_bytes)
        whole = torch.from_numpy(memory.bytes_RB.reshape(-1)).view(entry.dtype).view(-1, page_size, entry.width)
        first = group.rank * per_rank
        if readable is None:
            memory.close_file()
        else:
            own = memory.bytes_RB[group.rank, : num_layers * num_pages * page_bytes]
            offset = memory.offset + first * page_bytes
            readable.add_part(own.reshape(num_layers, num_pages, page_bytes), memory.fd, offset)
        return TeamPages(_layers(whole, num_layers, num_pages, first), first, (0,) * group.size)

    @staticmethod
    def on_gpus(
        num_layers: int,
        num_pages: int,
        page_size: int,
        entry: KVFormat,
        group: EPGroup,
        readable: CachePages | None = None,
    ) -> "TeamPages":
        """As on_cpus, but nobody else can read them: readable gets nothing. MemoryError where there is no room."""
        page_bytes = page_size * entry.width * entry.dtype.itemsize
        per_rank = _rounded(num_layers * num_pages, page_bytes, granularity(torch.cuda.current_device()))
        if group.size * per_rank * page_size > _MOST_ENTRIES:
            raise ValueError(
                f"--prompt-ranks: the KV caches of {group.size} ranks have {group.size * per_rank * page_size} entries "
                f"in all layers together, of which at most {_MOST_ENTRIES} can be counted; lower --kv-cache-gb"
            )
        desk = FdDesk() if group.fd_desk() is None else None
        torch.cuda.empty_cache()  # what torch keeps of the weights' loading is not free for others
        try:
            memory = AdjacentGpuMemory(group, per_rank * page_bytes, desk)
        except (CudaError, ValueError) as error:
            if desk is not None:
                desk.close()
            if isinstance(error, ValueError):
                raise  # it names what is wrong with these GPUs
            size_gb = per_rank * page_bytes / 2**30
            raise MemoryError(
                f"the KV cache takes {size_gb:.1f} GB (2**30 bytes) on each GPU, where the others map it, which fails: "
                f"{error}; lower --kv-cache-gb if there is no room, or leave out --prompt-ranks"
            ) from None
        whole = memory.row(entry.dtype).view(-1, page_size, entry.width)
        shift_N = [memory.place_of(rank) * per_rank for rank in range(group.size)]
        return TeamPages(_layers(whole, num_layers, num_pages, 0), 0, shift_N, memory, desk)

    def restart(self, alive: Sequence[bool]) -> None:
        """With nothing under way: maps the pages of the ranks that take part now, of the processes that they are."""
        if self.memory is not None:
            self.memory.remap(alive)

    def close(self) -> None:
        """Collective while all ranks live; never hangs when some do not."""
        if self.memory is not None:
            self.memory.close()
        if self.desk is not None:
            self.desk.close()


def agreed_pages(group: EPGroup, num_pages: int) -> int:
    """How many pages each rank has: what all of them have room for. A rank that joins has as many as its predecessor,
    whatever it finds room for itself. Collective."""
    said_N = group.allgather(num_pages)
    window = group.lasting_window(8)
    kept = window.segments[group.local_ranks.index(group.rank)].view(np.int64)
    if not group.joins:
        kept[0] = min(said_N)
    agreed = int(kept[0])
    del kept  # before the window's memory
    window.close()
    return agreed


def _rounded(num_pages: int, page_bytes: int, unit: int) -> int:
    """At least so many pages, whose bytes are a multiple of `unit`."""
    return num_pages + -num_pages % (unit // gcd(unit, page_bytes))


def _layers(whole_PSD: Tensor, num_layers: int, num_pages: int, first: int) -> list[LayerCache]:
    padding = first + num_pages - 1
    starts = range(0, num_layers * num_pages, num_pages)
    return [LayerCache(whole_PSD[start:], own_padding=padding) for start in starts]
