"""DummyCheckpoint: random weights of a model's shape, made where they are needed: for measuring without a checkpoint.

The same values on every rank, from each tensor's name. Matrices are small enough for activations to stay in range.
"""

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from eprt.config import ModelConfig
from eprt.models.checkpoint import FP8, SCALE_SUFFIX, TensorInfo, TensorSource
from eprt.models.deepseek_tensors import Kind
from eprt.ops.weight import BLOCK

# |e4m3| of a standard normal times this keeps its precision; the scale takes it out again.
_FP8_GAIN = 64.0


class DummyCheckpoint(TensorSource):
    """expected: see deepseek_tensors.py."""

    def __init__(self, model_dir: str | Path, config: ModelConfig, expected: Mapping[str, Kind], device: torch.device):
        super().__init__(model_dir, device)
        for name, (shape, may_be_fp8) in expected.items():
            quantised = config.quant_method == "fp8" and may_be_fp8 and len(shape) == 2
            self.tensors[name] = TensorInfo(self.model_dir, shape, FP8 if quantised else "BF16")
            if quantised:
                blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
                self.tensors[name + SCALE_SUFFIX] = TensorInfo(self.model_dir, blocks, "F32")

    def _read(self, name: str) -> Tensor:
        info = self.tensors[name]
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        value = torch.randn(info.shape, generator=generator, device=self.device, dtype=torch.float32)
        if name.endswith(SCALE_SUFFIX):
            columns = self.tensors[name.removesuffix(SCALE_SUFFIX)].shape[-1]
            return torch.full_like(value, columns**-0.5 / _FP8_GAIN)
        if self.is_fp8(name):
            return value.mul_(_FP8_GAIN).to(torch.float8_e4m3fn)
        if "norm" in name:
            return value.mul_(0.1).add_(1.0).bfloat16()
        return value.mul_(info.shape[-1] ** -0.5 if len(info.shape) == 2 else 0.01).bfloat16()

    def fingerprint(self, names: Iterable[str]) -> str:
        """Names and shapes decide the values."""
        return repr([(name, self.tensors[name].shape) for name in names])
