"""The weights of a block on the meta device, read by name: from a checkpoint, or by the caller's function.

Names are those of published checkpoints, as model.layers.3.mlp.experts.7.gate_proj.weight. Reads what it is asked for
and nothing else.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from eprt.compat.hf.block import SwigluMatrices
from eprt.compat.hf.kinds import BlockKind
from eprt.compat.hf.weights import SCALE, fp8_weight
from eprt.layers.linear import Matrix
from eprt.models.checkpoint import Checkpoint, TensorSource
from eprt.ops.weight import BLOCK

# A function from a tensor's name to the tensor, a directory of safetensors files, or one that is already open.
Loader = Callable[[str], Tensor] | str | Path | TensorSource


def open_loader(loader: Loader) -> Callable[[str], Tensor]:
    """A function from name to tensor. KeyError or CheckpointError where there is no such tensor."""
    if isinstance(loader, (str, Path)):
        loader = Checkpoint(loader)
    return loader.read if isinstance(loader, TensorSource) else loader


class NamedWeights:
    """Reads a block's tensors.

    read: from name to tensor.
    prefix: of the block's names, with the dot: "model.layers.3.mlp.", or "" for a function that knows the block.
    """

    def __init__(self, read: Callable[[str], Tensor], prefix: str, kind: BlockKind):
        self._read, self._kind, self._prefix = read, kind, prefix
        if prefix.endswith("mlp."):
            self._prefix = prefix.removesuffix("mlp.") + kind.checkpoint_name + "."

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        name = self._prefix + name
        try:
            tensor = self._read(name)
        except KeyError:
            _refuse(name, "is not there")
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
            _refuse(name, f"is {_described(tensor)}, expected {shape}")
        if tensor.is_meta:
            _refuse(name, "is on the meta device, too: it has no values")
        return tensor.detach()

    def expert(self, expert: int, intermediate_size: int, hidden_size: int) -> SwigluMatrices:
        prefixes = [f"experts.{expert}.{projection}." for projection in self._kind.projections]
        return self._swiglu(prefixes, intermediate_size, hidden_size)

    def shared(self, intermediate_size: int, hidden_size: int) -> SwigluMatrices:
        names = ("gate_proj", "up_proj", "down_proj")
        return self._swiglu([f"shared_experts.{name}." for name in names], intermediate_size, hidden_size)

    def _swiglu(self, prefixes: list[str], intermediate_size: int, hidden_size: int) -> SwigluMatrices:
        gate, up, down = (f"{prefix}weight" for prefix in prefixes)
        wide = intermediate_size, hidden_size
        return self._matrix(gate, wide), self._matrix(up, wide), self._matrix(down, (hidden_size, intermediate_size))

    def _matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        weight = self.tensor(name, shape)
        if weight.dtype != torch.float8_e4m3fn:
            return weight
        blocks = -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)
        return fp8_weight(weight, self.tensor(name + SCALE, blocks))


def _described(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _refuse(name: str, problem: str) -> NoReturn:
    raise ValueError(f"loader: tensor {name} {problem}")
