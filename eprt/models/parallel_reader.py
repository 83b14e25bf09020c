"""ParallelReader: tensors' bytes, read by several threads ahead of their use, straight to where they are needed.

safetensors maps its files: a tensor is read page by page when it is copied, by one thread, and on the way to a GPU once
more. Here what will be read is told beforehand. Its bytes are put in the order of the files, neighbours together, and
threads read them some way ahead: on the CPU into the tensors' own memory, for a GPU into pinned memory, each thread its
own, from where a stream of their own copies them while other threads read.
"""

import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import local

import torch
from torch import Tensor

_EXTENT_BYTES = 32 << 20  # of one read, and of a thread's pinned memory
_SORTED_BYTES = 256 << 20  # what is put in the files' order at a time: the reader's own order holds between such parts
# Read and not yet taken. On a CPU little: what has just been read is still in its caches when it is taken.
_WINDOW_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
_MOST_THREADS = 8
_MOST_PARTS = 512  # of a read; the kernel takes 1024


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes start..end-1 of a file."""

    path: Path
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class _Extent:
    """Neighbouring bytes of a file, and whose they are: (tensor, first byte of the tensor, number of bytes)."""

    path: Path
    start: int
    size: int = 0
    parts: list[tuple[str, int, int]] = field(default_factory=list)

    def can_take(self, path: Path, start: int, size: int) -> bool:
        """Whether it can be read together with these bytes."""
        follow = (self.path, self.start + self.size) == (path, start)
        return follow and self.size + size <= _EXTENT_BYTES and len(self.parts) < _MOST_PARTS


class ParallelReader:
    """where: every tensor's place, see byte_ranges(). names: what will be taken, about in this order.

    Errors of reading are OSErrors, raised by take().
    """

    def __init__(
        self,
        where: Mapping[str, FileRange],
        names: Iterable[str],
        device: torch.device,
        *,
        num_threads: int | None = None,
        window_bytes: int | None = None,
    ):
        self._where, self._device = where, device
        wanted = list(dict.fromkeys(names))
        self._handles = {path: os.open(path, os.O_RDONLY) for path in {where[name].path for name in wanted}}
        self._extents = deque(_extents(where, wanted))
        self._window_bytes = window_bytes or _WINDOW_BYTES[device.type]
        self._memory: dict[str, Tensor] = {}
        self._reads: dict[str, list[Future]] = {name: [] for name in wanted}
        self._num_unread = Counter(name for extent in self._extents for name, _, _ in extent.parts)
        self._num_outstanding = 0
        self._own = local()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        num_threads = num_threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(num_threads, initializer=self._begin_thread)
        self._submit()

    def __contains__(self, name: str) -> bool:
        """Whether it can still be taken."""
        return name in self._reads

    def take(self, name: str) -> Tensor:
        """uint8, all the tensor's bytes, on the device, the caller's own. Waits until they have been read."""
        while self._num_unread[name]:
            self._submit_one()
        for read in self._reads.pop(name):
            read.result()
        memory = self._memory.pop(name)
        if self._stream is not None:
            memory.record_stream(torch.cuda.current_stream(self._device))
        self._num_outstanding -= memory.nbytes
        self._submit()
        return memory

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()
        self._memory.clear()

    def _submit(self) -> None:
        while self._extents and self._num_outstanding < self._window_bytes:
            self._submit_one()

    def _submit_one(self) -> None:
        extent = self._extents.popleft()
        # Tensors of the stream that writes them: memory is not written before its last user has gone.
        with torch.cuda.stream(self._stream):
            for name, _, _ in extent.parts:
                if name not in self._memory:
                    self._memory[name] = torch.empty(self._where[name].size, dtype=torch.uint8, device=self._device)
        self._num_outstanding += extent.size
        # The thread gets the memory itself: an error may have made take() forget it.
        parts = [self._memory[name][at : at + size] for name, at, size in extent.parts]
        read = self._threads.submit(self._read if self._stream is None else self._read_and_copy, extent, parts)
        for name, _, _ in extent.parts:
            self._reads[name].append(read)
            self._num_unread[name] -= 1

    def _begin_thread(self) -> None:
        if self._stream is not None:
            # A thread begins on the first GPU, where pinned memory would cost this process a context.
            torch.cuda.set_device(self._stream.device)
            self._own.pinned = torch.empty(_EXTENT_BYTES, dtype=torch.uint8, pin_memory=True)

    def _read(self, extent: _Extent, parts: list[Tensor]) -> None:
        _fill(self._handles[extent.path], [part.numpy().data for part in parts], extent)

    def _read_and_copy(self, extent: _Extent, parts: list[Tensor]) -> None:
        pinned = self._own.pinned[: extent.size]
        _fill(self._handles[extent.path], [pinned.numpy().data], extent)
        with torch.cuda.stream(self._stream):
            for part, source in zip(parts, pinned.split([len(part) for part in parts])):
                part.copy_(source, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        copied.synchronize()  # then the pinned memory is free again


def _fill(handle: int, views: list[memoryview], extent: _Extent) -> None:
    at = extent.start
    views = [view for view in views if len(view)]
    while views:
        num_bytes = os.preadv(handle, views[:_MOST_PARTS], at)
        if num_bytes == 0:
            raise OSError(f"the file ends at byte {at}, {extent.start + extent.size - at} bytes too early")
        at += num_bytes
        while views and num_bytes >= len(views[0]):
            num_bytes -= len(views.pop(0))
        if num_bytes:
            views[0] = views[0][num_bytes:]


def _extents(where: Mapping[str, FileRange], names: list[str]) -> Iterator[_Extent]:
    for together in _sorted_parts(where, names):
        extent: _Extent | None = None
        for name in together:
            place = where[name]
            for at in range(0, place.size, _EXTENT_BYTES):
                size = min(_EXTENT_BYTES, place.size - at)
                if extent is None or not extent.can_take(place.path, place.start + at, size):
                    if extent is not None:
                        yield extent
                    extent = _Extent(place.path, place.start + at)
                extent.parts.append((name, at, size))
                extent.size += size
            if place.size == 0:  # nothing to read, but something to take
                yield _Extent(place.path, place.start, 0, [(name, 0, 0)])
        if extent is not None:
            yield extent


def _sorted_parts(where: Mapping[str, FileRange], names: list[str]) -> Iterator[list[str]]:
    """The names in groups of some bytes, each group in the order of the files."""
    groups: list[list[str]] = [[]]
    num_bytes = 0
    for name in names:
        groups[-1].append(name)
        num_bytes += where[name].size
        if num_bytes >= _SORTED_BYTES:
            groups.append([])
            num_bytes = 0
    for group in groups:
        yield sorted(group, key=lambda name: (where[name].path, where[name].start))


def byte_ranges(path: Path) -> dict[str, FileRange]:
    """Of every tensor of a safetensors file: 8 bytes of header length, a JSON header, then the tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    first = 8 + length
    return {
        name: FileRange(path, first + entry["data_offsets"][0], first + entry["data_offsets"][1])
        for name, entry in header.items()
        if name != "__metadata__"
    }
