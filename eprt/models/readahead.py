"""ReadAhead: keeps the disk busy while tensors are copied and converted.

safetensors maps its files, so that a cold tensor is read page by page, each a wait of its own. Told beforehand, the
kernel reads long stretches in the background, as many at a time as the disk takes.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

_WINDOW_BYTES = 256 << 20


class ReadAhead:
    """names: in the order in which they will be read; one that is read out of turn is read as without this class."""

    def __init__(self, file_of: dict[str, Path], names: Iterable[str], window_bytes: int = _WINDOW_BYTES):
        self._window_bytes = window_bytes
        self._handles = {path: os.open(path, os.O_RDONLY) for path in set(file_of.values())}
        ranges = {path: _byte_ranges(path) for path in self._handles}
        self._stretches = [(file_of[name], *ranges[file_of[name]][name]) for name in names]
        self._next = 0
        self._asked = self._taken = 0

    def took(self, num_bytes: int) -> None:
        """num_bytes more have been read: asks for as many beyond the window."""
        self._taken += num_bytes
        while self._next < len(self._stretches) and self._asked < self._taken + self._window_bytes:
            path, start, end = self._stretches[self._next]
            os.posix_fadvise(self._handles[path], start, end - start, os.POSIX_FADV_WILLNEED)
            self._asked += end - start
            self._next += 1

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles = {}
        self._stretches = []


def _byte_ranges(path: Path) -> dict[str, tuple[int, int]]:
    """tensor -> [start, end) in the file. Format: 8 bytes of header length, a JSON header, then the tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    offset = 8 + length
    return {
        name: (offset + entry["data_offsets"][0], offset + entry["data_offsets"][1])
        for name, entry in header.items()
        if name != "__metadata__"
    }
