"""Reads tensors, numbers, strings and containers from a torch.save file without torch and without running its code.

A .pt file is a zip with a pickle and one file per storage. The pickle may only name the few functions below; anything
else is refused by name.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

_DTYPES = {
    "DoubleStorage": "f8",
    "FloatStorage": "f4",
    "HalfStorage": "f2",
    "BFloat16Storage": "bf16",
    "LongStorage": "i8",
    "IntStorage": "i4",
    "ShortStorage": "i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
}


def load(path: Path) -> Any:
    """The saved object with tensors as numpy arrays (bfloat16 as float32). ValueError says what cannot be read."""
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile:
        cause = "cut off while it was written or copied, or saved by torch before 1.6"
        raise ValueError(f"not a complete torch.save file: the zip directory at its end is missing ({cause})") from None
    with archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl") or name == "data.pkl"]
        if len(pickles) != 1:
            raise ValueError("a zip, but not a torch.save file: it holds no data.pkl")
        root = pickles[0][: -len("data.pkl")]
        order = archive.read(f"{root}byteorder").decode() if f"{root}byteorder" in archive.namelist() else "little"
        try:
            return _Unpickler(archive, root, "<" if order == "little" else ">").load()
        except (pickle.UnpicklingError, EOFError, KeyError, IndexError, AttributeError, TypeError) as error:
            raise ValueError(f"its data.pkl cannot be read: {error}") from None


class _StorageType(str):
    """A dtype that stands for a torch storage class while the pickle is read."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, root: str, byte_order: str):
        super().__init__(io.BytesIO(archive.read(f"{root}data.pkl")))
        self._archive, self._root, self._byte_order = archive, root, byte_order

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "torch" and global_name in _DTYPES:
            return _StorageType(_DTYPES[global_name])
        if (module_name, global_name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return OrderedDict
        rule = "is not a plain tensor or container: refused. Save a dict of tensors, numbers and lists"
        raise ValueError(f"it asks for {module_name}.{global_name}, which {rule}")

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, storage, key, _, num_items = pid
        if kind != "storage" or not isinstance(storage, _StorageType):
            raise ValueError(f"it refers to a {kind!r} of an unknown type: refused")
        dtype = np.dtype("u2" if storage == "bf16" else storage).newbyteorder(self._byte_order)  # type: ignore[arg-type]
        try:
            data = self._archive.read(f"{self._root}data/{key}")
        except (KeyError, zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"its storage {key} is missing or damaged: {error}") from None
        if len(data) < num_items * dtype.itemsize:
            raise ValueError(f"its storage {key} has {len(data)} bytes, {num_items} x {dtype.itemsize} are needed")
        items = np.frombuffer(data, dtype=dtype, count=num_items)
        return (items.astype(np.uint32) << 16).view(np.float32) if storage == "bf16" else items


def _rebuild_tensor(items: np.ndarray, offset: int, size: tuple, stride: tuple, *_: Any) -> np.ndarray:
    last = offset + sum((n - 1) * step for n, step in zip(size, stride)) if 0 not in size else offset - 1
    if offset < 0 or min(stride, default=0) < 0 or last >= len(items):
        raise ValueError(f"a tensor of shape {tuple(size)} reaches beyond its storage of {len(items)} values")
    steps = tuple(step * items.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(items[offset:], tuple(size), steps, writeable=False)
