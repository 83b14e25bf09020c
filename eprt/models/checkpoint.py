"""Checkpoint: the tensors of a Hugging Face directory, read one by one on demand.

Knows safetensors files, their index and fp8 block scales; knows nothing of models. Opening reads only the headers.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eprt.models.parallel_reader import FileRange, ParallelReader, byte_ranges
from eprt.ops.weight import BLOCK, Weight

INDEX_NAME = "model.safetensors.index.json"
# DeepSeek's name for the fp32 scales of an fp8 matrix, one per 128x128 block; despite "inv", values are multiplied.
SCALE_SUFFIX = "_scale_inv"
FP8 = "F8_E4M3"
FP4 = "I8"  # two e2m1 values to a byte; safetensors has no name for it
_SAMPLE_BYTES = 64
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    FP8: torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointError(ValueError):
    """The files do not hold the model that config.json describes. The message names file and tensor."""


@dataclass(frozen=True)
class TensorInfo:
    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name for it, as "BF16"

    @property
    def num_bytes(self) -> int:
        dtype = _DTYPES.get(self.dtype)
        return torch.Size(self.shape).numel() * (1 if dtype is None else dtype.itemsize)


class TensorSource:
    """Tensors by name, with an account of what has been read. Where they come from is the subclass's affair."""

    def __init__(self, model_dir: str | Path, device: torch.device | str):
        self.model_dir, self.device = Path(model_dir), torch.device(device)  # device: where tensors go
        self.tensors: dict[str, TensorInfo] = {}
        self.num_bytes_read = 0
        self.on_read: Callable[[], None] = lambda: None  # called after each tensor
        self._kept_rows: dict[str, slice] = {}  # of tensors that are read in part

    def keep_rows(self, name: str, rows: range) -> None:
        """From now on the tensor is these of its rows, and no others are read: of fp8, whole blocks with their scales.
        Before read_ahead(), once for each."""
        if self.is_fp8(name):
            self._keep_rows(self.scale_name(name), range(rows.start // BLOCK, -(-rows.stop // BLOCK)))
        self._keep_rows(name, rows)

    def _keep_rows(self, name: str, rows: range) -> None:
        info = self.tensors[name]
        self._kept_rows[name] = slice(rows.start, rows.stop)
        self.tensors[name] = replace(info, shape=(len(rows), *info.shape[1:]))

    def read(self, name: str) -> Tensor:
        """The whole tensor, in memory of its own."""
        tensor = self._read(name)
        self.num_bytes_read += self.tensors[name].num_bytes
        self.on_read()
        return tensor

    def _read(self, name: str) -> Tensor:
        raise NotImplementedError

    def read_weight(self, name: str) -> Weight:
        """A matrix, with its scales when it is fp8 or fp4."""
        data = self.read(name)
        if data.dtype == torch.float16:  # the kernels take none, and float32 holds it exactly
            return Weight(data.float())
        if not self.is_quantised(name):
            return Weight(data)
        scale = self.read(self.scale_name(name))
        if data.dtype == torch.int8:
            return Weight(data.view(torch.uint8), scale.view(torch.uint8))
        return Weight(data, scale.float())

    def scale_name(self, name: str) -> str:
        """The tensor with a quantised matrix's scales: V4 has NAME.scale beside NAME.weight, earlier models append."""
        short = f"{name.removesuffix('weight')}scale"
        return short if short in self.tensors else name + SCALE_SUFFIX

    def is_fp8(self, name: str) -> bool:
        return name in self.tensors and self.tensors[name].dtype == FP8

    def is_quantised(self, name: str) -> bool:
        return name in self.tensors and self.tensors[name].dtype in (FP8, FP4)

    def fingerprint(self, names: Iterable[str]) -> str:
        """Of these tensors' shapes, formats and a few of their values: another one for another checkpoint."""
        raise NotImplementedError

    def read_ahead(self, names: Iterable[str]) -> None:
        """Announces the order in which tensors will be read from now on: threads run ahead. Others can be read too."""

    def close(self) -> None:
        """Closes the files. What is announced to read_ahead() after that can still be read."""


class Checkpoint(TensorSource):
    """The tensors of everything in a directory's files."""

    def __init__(self, model_dir: str | Path, device: torch.device | str = "cpu"):
        super().__init__(model_dir, device)
        self._ahead: ParallelReader | None = None
        self._range_of: dict[str, FileRange] = {}
        if not self.model_dir.is_dir():
            raise CheckpointError(f"{self.model_dir}: no such directory; give one with config.json and *.safetensors")
        self._files = {path: _open(path) for path in _files_of(self.model_dir)}
        for path, file in self._files.items():
            for name in file.keys():  # noqa: SIM118  (not a dict)
                if name in self.tensors:
                    raise CheckpointError(f"tensor {name} is in both {self.tensors[name].file.name} and {path.name}")
                view = file.get_slice(name)
                self.tensors[name] = TensorInfo(path, tuple(view.get_shape()), view.get_dtype())
        self._check_index()

    def _read(self, name: str) -> Tensor:
        info = self.tensors[name]
        try:
            if self._ahead is not None and name in self._ahead and info.dtype in _DTYPES:
                return self._ahead.take(name).view(_DTYPES[info.dtype]).view(info.shape)
            # A copy: what safe_open returns is a view of the mapped file, slow at first touch and at its mercy.
            if name in self._kept_rows:
                return self._files[info.file].get_slice(name)[self._kept_rows[name]].to(self.device, copy=True)
            return self._files[info.file].get_tensor(name).to(self.device, copy=True)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{info.file}: cannot read tensor {name}: {error}") from None

    def fingerprint(self, names: Iterable[str]) -> str:
        digest, ranges = hashlib.sha256(), self._byte_ranges()
        for name in names:
            info, place = self.tensors[name], ranges[name]
            digest.update(f"{name} {info.shape} {info.dtype} ".encode())
            with place.path.open("rb") as file:
                file.seek((place.start + place.end) // 2)  # a table may begin with rows that nobody trains
                digest.update(file.read(min(_SAMPLE_BYTES, place.end - file.tell())))
        return digest.hexdigest()

    def _byte_ranges(self) -> dict[str, FileRange]:
        if not self._range_of:
            self._range_of = {name: place for path in self._files for name, place in byte_ranges(path).items()}
        return self._range_of

    def _keep_rows(self, name: str, rows: range) -> None:
        info, place = self.tensors[name], self._byte_ranges()[name]
        row_bytes = place.size // info.shape[0]
        kept = place.start + rows.start * row_bytes, place.start + rows.stop * row_bytes
        self._range_of[name] = FileRange(place.path, *kept)
        super()._keep_rows(name, rows)

    def read_ahead(self, names: Iterable[str]) -> None:
        self._stop_ahead()
        self._ahead = ParallelReader(self._byte_ranges(), names, self.device)

    def close(self) -> None:
        self._files.clear()
        self._stop_ahead()

    def _stop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _check_index(self) -> None:
        index = self.model_dir / INDEX_NAME
        if not index.exists():
            return
        absent = [
            f"{name} (not in {file})"
            for name, file in _weight_map(index).items()
            if name not in self.tensors or self.tensors[name].file.name != file
        ]
        if absent:
            raise CheckpointError(f"{index} promises tensors that the files lack: {', '.join(absent)}")


def _files_of(model_dir: Path) -> list[Path]:
    index = model_dir / INDEX_NAME
    if not index.exists():
        files = sorted(model_dir.glob("*.safetensors"))
        if not files:
            found = ", ".join(sorted(p.name for p in model_dir.iterdir())) or "nothing"
            raise CheckpointError(f"{model_dir}: no *.safetensors files (it has {found}); other formats are not read")
        return files
    files = [model_dir / name for name in sorted(set(_weight_map(index).values()))]
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise CheckpointError(f"{model_dir}: files named in {INDEX_NAME} are missing: {', '.join(missing)}")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: not a safetensors index with a weight_map: {error!r}") from None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: its weight_map must give each tensor's name the name of a file")
    return weight_map


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a complete safetensors file ({error}); it has {path.stat().st_size} bytes: "
            "was the download cut off?"
        ) from None
