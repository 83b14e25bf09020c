"""PageReader: how a rank reads pages of another instance's KV cache; PageSource and HeldPages say where and which.

The owner of the memory that is written is the one who copies: whatever becomes of a request, nobody else writes into a
rank's pages. Imports no torch, so that the process that serves HTTP can pass sources on. Knows nothing of requests.
"""

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

# name -> module:class, imported when a source names it
_READERS = {
    "memory": "eprt.kv.memory:MemoryReader",
    "nixl": "eprt.kv.nixl:NixlReader",
    "peer": "eprt.kv.peer:PeerReader",
    "tcp": "eprt.kv.tcp:TcpReader",
}
FAR_READERS = ("tcp", "nixl")  # that reach other hosts


class CachePart(msgspec.Struct, frozen=True):
    """One piece of memory that a cache is made of."""

    fd: int  # in the owner's process; of a GPU's, by which the owner's desk gives it
    shape: tuple[int, int, int]  # layers (an MTP layer is the last), pages, bytes of a page in a layer
    offset: int = 0  # of its first byte in the file

    def fits(self, other: "CachePart") -> bool:
        """Whether pages of one can be pages of the other."""
        return (self.shape[0], self.shape[2]) == (other.shape[0], other.shape[2])


class PageSource(msgspec.Struct, frozen=True):
    """One rank's cache, as others can read it."""

    reader: str  # for other hosts, a name of _READERS; "memory", "peer": they cannot read it
    owner: str  # of this process and no other, whatever became of it; who knows it may read the pages
    pid: int
    parts: tuple[CachePart, ...]  # a page has its place in all of them
    host: str = ""  # this_host() of the process
    # Where its KVPageServer listens; a host of "" stands for the one at which whoever reads has found the server.
    address: tuple[str, int] | None = None
    desk: str = ""  # the FdDesk that gives the descriptors of a GPU's memory; "": the memory is the host's

    def fits(self, other: "PageSource") -> bool:
        """Whether pages of one can be pages of the other."""
        both = zip(self.parts, other.parts)
        return len(self.parts) == len(other.parts) and all(mine.fits(theirs) for mine, theirs in both)


class HeldPages(msgspec.Struct, frozen=True):
    """Pages that stay as they are until they have been read."""

    source: PageSource
    pages: list[int]  # in the order of their tokens; the last one may be filled in part
    checksums: list[int]  # of each of all_pages, in all layers
    tail: list[int] = []  # further pages, without which these are not enough, of models whose cache has such
    bookmark: list[int] = []  # with which another request can go on behind the last full one of `pages`

    @property
    def all_pages(self) -> list[int]:
        return [*self.pages, *self.tail, *self.bookmark]


class PageReader(ABC):
    """Reads the pages of one source. Its methods are called from one thread."""

    @abstractmethod
    def read_pages(self, from_pages: Sequence[int], into_LPB: Sequence[Any], to_pages: Sequence[int]) -> None:
        """Copies pages, in all layers, into others. into_LPB: as ReadableCache has it; between GPUs the copies are made
        in the order of the current stream. OSError where the source is gone."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the source's memory."""


def check_pages(
    source: PageSource, from_pages: Sequence[int], into_LPB: Sequence[Any], to_pages: Sequence[int]
) -> None:
    """ValueError for a page that one of the two caches has not."""
    for part, into in zip(source.parts, into_LPB, strict=True):
        for pages, num_pages in ((from_pages, part.shape[1]), (to_pages, into.shape[1])):
            if pages and not 0 <= min(pages) <= max(pages) < num_pages:
                raise ValueError(f"the pages {min(pages)}..{max(pages)} are not in a cache of {num_pages}")


@functools.cache
def this_host() -> str:
    """Equal in processes that can map each other's memory: of one kernel, one set of processes, and one user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"


def open_reader(source: PageSource) -> PageReader:
    """ValueError for a reader that this version does not have, and for memory of another host; OSError where the source
    is gone."""
    is_here = source.host == this_host()
    near = "peer" if source.desk else "memory"
    reader = near if is_here else source.reader
    if reader not in _READERS:
        raise ValueError(f"no reader is called {reader!r}; there are {', '.join(sorted(_READERS))}")
    if reader == near and not is_here:
        raise ValueError(f"the pages of process {source.pid} lie in the memory of another host, or of another user")
    module, _, name = _READERS[reader].partition(":")
    return getattr(import_module(module), name)(source)
