"""Checkpoint: the tensors of a Hugging Face directory, read one by one on demand.

Knows safetensors files, their index and fp8 block scales; knows nothing of models. Opening reads only the headers.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eprt.models.parallel_reader import ParallelReader, byte_ranges
from eprt.ops.weight import Weight

INDEX_NAME = "model.safetensors.index.json"
# DeepSeek's name for the fp32 scales of an fp8 matrix, one per 128x128 block; despite "inv", values are multiplied.
SCALE_SUFFIX = "_scale_inv"
FP8 = "F8_E4M3"
_SAMPLE_BYTES = 64
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    FP8: torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointError(ValueError):
    """The files do not hold the model that config.json describes; the message names file and tensor."""


@dataclass(frozen=True)
class TensorInfo:
    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name for it, as "BF16"

    @property
    def num_bytes(self) -> int:
        dtype = _DTYPES.get(self.dtype)
        return torch.Size(self.shape).numel() * (1 if dtype is None else dtype.itemsize)


class Checkpoint:
    """tensors: name -> TensorInfo of everything in the files. on_read is called with the bytes of each tensor read.

    num_bytes_read: so far. device: where tensors go.
    """

    def __init__(
        self,
        model_dir: str | Path,
        on_read: Callable[[int], None] | None = None,
        device: torch.device | str = "cpu",
    ):
        self.model_dir = Path(model_dir)
        self.on_read, self.device = on_read, torch.device(device)
        self.num_bytes_read = 0
        self._ahead: ParallelReader | None = None
        if not self.model_dir.is_dir():
            raise CheckpointError(f"{self.model_dir}: no such directory; give one with config.json and *.safetensors")
        self._files = {path: _open(path) for path in _files_of(self.model_dir)}
        self.tensors: dict[str, TensorInfo] = {}
        for path, file in self._files.items():
            for name in file.keys():  # noqa: SIM118  (not a dict)
                if name in self.tensors:
                    raise CheckpointError(f"tensor {name} is in both {self.tensors[name].file.name} and {path.name}")
                view = file.get_slice(name)
                self.tensors[name] = TensorInfo(path, tuple(view.get_shape()), view.get_dtype())
        self._check_index()

    def read(self, name: str) -> Tensor:
        """The whole tensor, in memory of its own."""
        info = self.tensors[name]
        try:
            if self._ahead is not None and name in self._ahead and info.dtype in _DTYPES:
                tensor = self._ahead.take(name).view(_DTYPES[info.dtype]).view(info.shape)
            else:
                # A copy: what safe_open returns is a view of the mapped file, slow at first touch and at its mercy.
                tensor = self._files[info.file].get_tensor(name).to(self.device, copy=True)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{info.file}: cannot read tensor {name}: {error}") from None
        self._report(info.num_bytes)
        return tensor

    def read_weight(self, name: str) -> Weight:
        """A matrix with its block scales when it is fp8."""
        data = self.read(name)
        if data.dtype == torch.float16:  # the kernels take none, and float32 holds it exactly
            return Weight(data.float())
        if data.dtype != torch.float8_e4m3fn:
            return Weight(data)
        return Weight(data, self.read(name + SCALE_SUFFIX).float())

    def fingerprint(self, names: Iterable[str]) -> str:
        """Of these tensors' shapes, formats and a few of their values: another one for another checkpoint."""
        digest = hashlib.sha256()
        ranges = {name: place for path in self._files for name, place in byte_ranges(path).items()}
        for name in names:
            info, place = self.tensors[name], ranges[name]
            digest.update(f"{name} {info.shape} {info.dtype} ".encode())
            with place.path.open("rb") as file:
                file.seek((place.start + place.end) // 2)  # a table may begin with rows that nobody trains
                digest.update(file.read(min(_SAMPLE_BYTES, place.end - file.tell())))
        return digest.hexdigest()

    def is_fp8(self, name: str) -> bool:
        return name in self.tensors and self.tensors[name].dtype == FP8

    def read_ahead(self, names: Iterable[str]) -> None:
        """Tells the order in which tensors will be read from now on: threads run ahead. Others can be read too."""
        self._stop_ahead()
        ranges = {name: place for path in self._files for name, place in byte_ranges(path).items()}
        self._ahead = ParallelReader(ranges, names, self.device)

    def close(self) -> None:
        self._files.clear()
        self._stop_ahead()

    def _stop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _report(self, num_bytes: int) -> None:
        self.num_bytes_read += num_bytes
        if self.on_read is not None:
            self.on_read(num_bytes)

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
