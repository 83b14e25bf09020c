"""Fingerprint of a checkpoint: equal for two directories with the same model, other for other weights of its shape.

The configuration, the names, sizes and headers of the weight files, and their bytes: all of them where there are few,
else a sample of every tensor, since a large checkpoint takes minutes to read. Loads no torch.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import msgspec

import eprt

_WHOLE_BYTES = 256 << 20  # of all files; they are read whole
_SAMPLE_BYTES = 4096  # of each tensor, from its middle: a table may begin with rows that nobody trains
_HEADER_LENGTH = struct.Struct("<Q")  # a safetensors file: this, a header in JSON, the tensors
_NUM_THREADS = 8


def fingerprint(model_dir: str) -> str:
    """OSError where the directory cannot be read."""
    path = Path(model_dir)
    digest = hashlib.sha256((path / "config.json").read_bytes())
    files = sorted(path.glob("*.safetensors"))
    whole = sum(file.stat().st_size for file in files) <= _WHOLE_BYTES
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for file, content in zip(files, threads.map(lambda file: _content(file, whole), files)):
            digest.update(f"{file.name} {file.stat().st_size} {content}\n".encode())
    return digest.hexdigest()


def begin_fingerprint(model_dir: str) -> "Future[str]":
    """The same, by a thread that the end of the process does not wait for; "" where the directory cannot be read."""
    done: Future[str] = Future()

    def read() -> None:
        try:
            done.set_result(fingerprint(model_dir))
        except OSError:
            done.set_result("")

    Thread(target=read, name="eprt-fingerprint", daemon=True).start()
    return done


def why_not_alike(version: str, model: str | None, model_dir: str, known: Callable[[], str]) -> str | None:
    """Why what asks to join cannot compute with this server.

    version: of its eprt.
    model: its fingerprint; None: it takes the server's model, or does not know yet.
    model_dir: the server's.
    known: gives the fingerprint of what the server has loaded, "" where it is not known; may wait.
    """
    if version != eprt.__version__:
        return f"the server runs eprt {eprt.__version__}, this is eprt {version}"
    if model is not None and known() not in ("", model):
        return f"another model than the server's ({model_dir}): config.json or the weight files differ"
    return None


def _content(path: Path, whole: bool) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        ranges = [(0, os.fstat(file.fileno()).st_size)] if whole else _samples(file.fileno())
        for start, end in ranges:
            while start < end and (data := os.pread(file.fileno(), min(end - start, 1 << 20), start)):
                digest.update(data)
                start += len(data)
    return digest.hexdigest()


def _samples(fd: int) -> Iterator[tuple[int, int]]:
    """Byte ranges: the header, and a part of every tensor; of a file that is none of safetensors its beginning."""
    size = os.fstat(fd).st_size
    begin = os.pread(fd, _HEADER_LENGTH.size, 0)
    length = _HEADER_LENGTH.unpack(begin)[0] if len(begin) == _HEADER_LENGTH.size else 0
    first = min(_HEADER_LENGTH.size + length, size)
    yield 0, first
    if first <= _HEADER_LENGTH.size:
        return
    try:
        header = msgspec.json.decode(os.pread(fd, first - _HEADER_LENGTH.size, _HEADER_LENGTH.size))
        places = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        for start, end in places:
            middle = (start + end) // 2
            yield first + middle, first + min(middle + _SAMPLE_BYTES, end)
    except (ValueError, KeyError, TypeError, AttributeError):
        return
