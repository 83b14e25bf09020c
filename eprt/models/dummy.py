"""DummyCheckpoint: random weights of a model's shape, made where they are needed: for measuring without a checkpoint.

The same values on every rank, from each tensor's name. Matrices are small enough for activations to stay in range. On
a CPU, where torch draws with one thread, tensors are drawn side by side, ahead of their use.
"""

import math
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from eprt.config import ModelConfig
from eprt.models.checkpoint import FP4, FP8, SCALE_SUFFIX, TensorInfo, TensorSource
from eprt.models.deepseek_tensors import Kind
from eprt.models.tensor_family import expert_number
from eprt.ops.weight import BLOCK, FP4_BLOCK

# |e4m3| of a standard normal times this keeps its precision; the scale takes it out again.
_FP8_GAIN = 64.0
_FP4_SPREAD = 2.9  # standard deviation of the values of random bits
_TABLE = "tid2eid"
_AHEAD_BYTES = 1 << 29  # drawn and not yet read


class DummyCheckpoint(TensorSource):
    """expected: see deepseek_tensors.py."""

    def __init__(self, model_dir: str | Path, config: ModelConfig, expected: Mapping[str, Kind], device: torch.device):
        super().__init__(model_dir, device)
        self._config = config
        self._whole_shape: dict[str, tuple[int, ...]] = {}  # of tensors that are read in part
        self._to_draw: dict[str, None] = {}  # what was announced and nobody draws yet, in order
        self._drawn: dict[str, Future[Tensor]] = {}
        self._bytes_ahead = 0
        self._threads: ThreadPoolExecutor | None = None
        for name, (shape, may_be_quantised) in expected.items():
            if name.endswith(_TABLE):
                self.tensors[name] = TensorInfo(self.model_dir, shape, "I64")
            elif config.quant_method != "fp8" or not may_be_quantised or len(shape) != 2:
                self.tensors[name] = TensorInfo(self.model_dir, shape, "BF16")
            elif config.v4 is not None and config.v4.expert_dtype == "fp4" and expert_number(name) is not None:
                rows, columns = shape
                self.tensors[name] = TensorInfo(self.model_dir, (rows, columns // 2), FP4)
                blocks = (rows, columns // FP4_BLOCK)
                self.tensors[f"{name.removesuffix('weight')}scale"] = TensorInfo(self.model_dir, blocks, "F8_E8M0")
            else:
                self.tensors[name] = TensorInfo(self.model_dir, shape, FP8)
                blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
                self.tensors[name + SCALE_SUFFIX] = TensorInfo(self.model_dir, blocks, "F32")

    def read_ahead(self, names: Iterable[str]) -> None:
        self.close()
        if self.device.type != "cpu":
            return
        self._to_draw = dict.fromkeys(name for name in names if self._is_drawn(name))
        self._threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._draw_ahead()

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._to_draw, self._drawn, self._bytes_ahead, self._threads = {}, {}, 0, None

    def _read(self, name: str) -> Tensor:
        info = self.tensors[name]
        if info.dtype in ("I64", FP4, "F8_E8M0"):
            return self._read_integers(info, self._generator(name))
        if name.endswith(SCALE_SUFFIX):
            columns = self.tensors[name.removesuffix(SCALE_SUFFIX)].shape[-1]
            return torch.full(info.shape, columns**-0.5 / _FP8_GAIN, device=self.device)
        value = self._take(name)
        if self.is_fp8(name):
            return value.mul_(_FP8_GAIN).to(torch.float8_e4m3fn)
        if "norm" in name:
            return value.mul_(0.1).add_(1.0).bfloat16()
        return value.mul_(info.shape[-1] ** -0.5 if len(info.shape) == 2 else 0.01).bfloat16()

    def _is_drawn(self, name: str) -> bool:
        return not name.endswith(SCALE_SUFFIX) and self.tensors[name].dtype in ("BF16", FP8)

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))

    def _draw(self, name: str) -> Tensor:
        """Standard normals."""
        shape = self._whole_shape.get(name, self.tensors[name].shape)
        drawn = torch.randn(shape, generator=self._generator(name), device=self.device, dtype=torch.float32)
        return drawn[self._kept_rows[name]].clone() if name in self._kept_rows else drawn

    def _keep_rows(self, name: str, rows: range) -> None:
        self._whole_shape[name] = self.tensors[name].shape
        super()._keep_rows(name, rows)

    def _take(self, name: str) -> Tensor:
        """What a thread has drawn, or will have; what nobody was told to draw is drawn now."""
        self._to_draw.pop(name, None)
        drawn = self._drawn.pop(name, None)
        if drawn is None:
            return self._draw(name)
        value = drawn.result()
        self._bytes_ahead -= value.nbytes
        self._draw_ahead()
        return value

    def _draw_ahead(self) -> None:
        while self._to_draw and self._bytes_ahead < _AHEAD_BYTES:
            assert self._threads is not None
            name = next(iter(self._to_draw))
            del self._to_draw[name]
            self._drawn[name] = self._threads.submit(self._draw, name)
            self._bytes_ahead += 4 * math.prod(self.tensors[name].shape)

    def _read_integers(self, info: TensorInfo, generator: torch.Generator) -> Tensor:
        """A table of experts, fp4 values, or their scales: of columns that are twice, or 32 times, as many."""
        if info.dtype == "I64":
            assert self._config.moe is not None
            most = self._config.moe.num_experts
            keys = torch.rand(info.shape[0], most, generator=generator, device=self.device)
            return keys.argsort(dim=1)[:, : info.shape[1]].contiguous()
        if info.dtype == FP4:
            bits = torch.randint(256, info.shape, generator=generator, device=self.device, dtype=torch.uint8)
            return bits.view(torch.int8)
        exponent = 127 - round(math.log2(_FP4_SPREAD * (info.shape[1] * FP4_BLOCK) ** 0.5))
        return torch.full(info.shape, exponent, dtype=torch.uint8, device=self.device).view(torch.float8_e8m0fnu)

    def fingerprint(self, names: Iterable[str]) -> str:
        """Names and shapes decide the values."""
        return repr([(name, self.tensors[name].shape) for name in names])
