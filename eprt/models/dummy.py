"""DummyCheckpoint: random weights of a model's shape, made where they are needed: for measuring without a checkpoint.

The same values on every rank, from each tensor's name. Matrices are small enough for activations to stay in range.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from eprt.config import ModelConfig
from eprt.models.checkpoint import FP8, SCALE_SUFFIX, TensorInfo
from eprt.models.deepseek_tensors import Shape
from eprt.ops.weight import BLOCK, Weight

# |e4m3| of a standard normal times this keeps its precision; the scale takes it out again.
_FP8_GAIN = 64.0


class DummyCheckpoint:
    """Has what the loader asks of a Checkpoint. expected: name -> (shape, may be fp8), see deepseek_tensors.py."""

    def __init__(
        self,
        model_dir: str | Path,
        config: ModelConfig,
        expected: Mapping[str, tuple[Shape, bool]],
        device: torch.device,
    ):
        self.model_dir, self.device = Path(model_dir), device
        self.on_read: Callable[[int], None] | None = None
        self.num_bytes_read = 0
        fp8 = config.quant_method == "fp8"
        self.tensors: dict[str, TensorInfo] = {}
        for name, (shape, may_be_fp8) in expected.items():
            quantised = fp8 and may_be_fp8 and len(shape) == 2
            self.tensors[name] = TensorInfo(self.model_dir, shape, FP8 if quantised else "BF16")
            if quantised:
                blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
                self.tensors[name + SCALE_SUFFIX] = TensorInfo(self.model_dir, blocks, "F32")

    def read(self, name: str) -> Tensor:
        info = self.tensors[name]
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        value = torch.randn(info.shape, generator=generator, device=self.device, dtype=torch.float32)
        self.num_bytes_read += info.num_bytes
        if self.on_read is not None:
            self.on_read(info.num_bytes)
        if name.endswith(SCALE_SUFFIX):
            columns = self.tensors[name.removesuffix(SCALE_SUFFIX)].shape[-1]
            return torch.full_like(value, columns**-0.5 / _FP8_GAIN)
        if self.is_fp8(name):
            return value.mul_(_FP8_GAIN).to(torch.float8_e4m3fn)
        if "norm" in name:
            return value.mul_(0.1).add_(1.0).bfloat16()
        return value.mul_(info.shape[-1] ** -0.5 if len(info.shape) == 2 else 0.01).bfloat16()

    def fingerprint(self, names: Iterable[str]) -> str:
        """As Checkpoint's; names and shapes decide the values."""
        return repr([(name, self.tensors[name].shape) for name in names])

    def read_weight(self, name: str) -> Weight:
        return Weight(self.read(name), self.read(name + SCALE_SUFFIX) if self.is_fp8(name) else None)

    def is_fp8(self, name: str) -> bool:
        return self.tensors[name].dtype == FP8

    def read_ahead(self, names: Iterable[str]) -> None:
        """There is no disk to run ahead."""

    def close(self) -> None:
        """Nothing is open."""
