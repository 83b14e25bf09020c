"""TensorFamily: which tensors the models of a family have in their files, and how these are called.

Knows nothing of what the tensors mean.
"""

import re
from collections.abc import Container
from pathlib import Path

from eprt.config import ModelConfig
from eprt.models.checkpoint import Checkpoint

_EXPERT = re.compile(r"\.(?:mlp|ffn)\.experts\.(\d+)\.")


class TensorFamily:
    matrices: tuple[str, str, str]  # gate, up and down of an expert

    def expected_tensors(self, config: ModelConfig, mtp: bool = False) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Every tensor of the whole model, each expert's apart, and of its first MTP layer if wanted: its shape as a
        matrix of numbers, and whether it may be quantised."""
        raise NotImplementedError

    def check_mtp(self, config: ModelConfig, model_dir: str | Path) -> None:
        """CheckpointError where config.json has no layer to draft with."""
        raise NotImplementedError

    def check_tensors(self, config: ModelConfig, checkpoint: Checkpoint, mtp: bool = False) -> None:
        """CheckpointError listing the missing, extra, mis-shaped and unreadable tensors. mtp: its layer is needed."""
        raise NotImplementedError

    def is_skipped(self, config: ModelConfig, name: str, names: Container[str], mtp: bool = False) -> bool:
        """Whether a tensor is known and not needed. names: all tensors of the checkpoint."""
        raise NotImplementedError

    def mlp_prefix(self, config: ModelConfig, layer: int) -> str:
        """What names of a layer's MLP or MoE begin with; an MTP layer has the number behind the last one."""
        raise NotImplementedError


def expert_number(name: str) -> int | None:
    """The expert that a tensor belongs to; None for the tensors that every rank reads."""
    match = _EXPERT.search(name)
    return None if match is None else int(match[1])
