"""Reads safetensors files without their library: the length of a JSON header, the header, and the tensors' bytes."""

import json
from pathlib import Path

import numpy as np

from ..checks import is_int

_DTYPES = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "F64": "<f8", "F32": "<f4", "F16": "<f2"}


def load(path: Path) -> dict[str, np.ndarray]:
    """The tensors by name; ValueError says what is missing or unknown."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8:start]) if len(data) >= max(start, 8) else None
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ValueError("cut off, or not a safetensors file: its header is incomplete")
    header.pop("__metadata__", None)
    return {name: _tensor(name, entry, data[start:]) for name, entry in header.items()}


def _tensor(name: str, entry: dict, data: bytes) -> np.ndarray:
    try:
        (begin, end), dtype, shape = entry["data_offsets"], str(entry["dtype"]), [int(n) for n in entry["shape"]]
        if not (is_int(begin, 0) and is_int(end, begin)) or min(shape, default=0) < 0:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"damaged: the header's entry {name!r} is {entry!r}") from None
    if dtype not in _DTYPES:
        raise ValueError(f"{name} has dtype {dtype}; it must be one of {', '.join(_DTYPES)}")
    if end > len(data):
        raise ValueError(f"cut off: {name} ends at byte {end}, the file has {len(data)}")
    items = np.frombuffer(data[begin:end], dtype=_DTYPES[dtype])
    if items.size != np.prod(shape, dtype=int):
        raise ValueError(f"{name} has {items.size} values, but its shape is {shape}")
    return items.reshape(shape)
