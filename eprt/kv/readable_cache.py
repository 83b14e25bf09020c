"""ReadableCache: one rank's KV cache in memory that other processes can read, page by page. Knows nothing of owners."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eprt.kv.reader import CachePart, PageSource


class ReadableCache(ABC):
    """Parts are added while the cache is made; after that its methods are called from one thread, but for
    after_steps()."""

    def __init__(self):
        self._parts: list[CachePart] = []
        self._owner = f"{os.getpid()}-{os.urandom(16).hex()}"

    @property
    @abstractmethod
    def bytes_LPB(self) -> Sequence[Any]:
        """uint8 [layers, pages, bytes] of each part: arrays, or tensors on a GPU."""

    @abstractmethod
    def allocate_part(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A further part [layers, pages, ...] of the cache, zeroed."""

    @property
    @abstractmethod
    def source(self) -> PageSource:
        """By which others find the pages."""

    @abstractmethod
    def checksums(self, pages: Sequence[int]) -> list[int]:
        """Of each page's bytes in all layers and parts."""

    @property
    def num_bytes(self) -> int:
        return sum(part.shape[0] * part.shape[1] * part.shape[2] for part in self._parts)

    def open_to_hosts(self, host: str, reader: str) -> None:
        """From now on other hosts can read the pages, too. host: the address of this one at which they come; reader:
        one of FAR_READERS. OSError where the address cannot be had, ValueError where the reader cannot run here."""
        raise ValueError(f"--page-reader {reader}: pages of GPUs are read on their own host only")

    # -- beside steps: on CPUs nothing is left to do --

    def enter_thread(self) -> None:
        """Called first in the thread that reads and sums pages."""

    def after_steps(self) -> Callable[[], None]:
        """What has been launched by now comes before all that the thread does once it has called the result."""
        return _nothing_to_wait_for

    def close(self) -> None:
        """The cache is not used here any more."""


def _nothing_to_wait_for() -> None:
    """Steps are complete when they return."""
