"""Which family of tensors a model's configuration asks for."""

from collections.abc import Container
from pathlib import Path

from eprt.config import ModelConfig
from eprt.models import deepseek_tensors
from eprt.models.checkpoint import Checkpoint
from eprt.models.deepseek_v4_tensors import V4Tensors
from eprt.models.tensor_family import TensorFamily


class MlaTensors(TensorFamily):
    """Of V2, V3 and V3.2."""

    matrices = "gate_proj", "up_proj", "down_proj"

    def expected_tensors(self, config: ModelConfig, mtp: bool = False) -> dict[str, deepseek_tensors.Kind]:
        return deepseek_tensors.expected_tensors(config, mtp)

    def check_mtp(self, config: ModelConfig, model_dir: str | Path) -> None:
        deepseek_tensors.check_mtp(config, model_dir)

    def check_tensors(self, config: ModelConfig, checkpoint: Checkpoint, mtp: bool = False) -> None:
        deepseek_tensors.check_tensors(config, checkpoint, mtp)

    def is_skipped(self, config: ModelConfig, name: str, names: Container[str], mtp: bool = False) -> bool:
        return deepseek_tensors.is_skipped(config, name, names, mtp)

    def mlp_prefix(self, config: ModelConfig, layer: int) -> str:
        return f"model.layers.{layer}.mlp."


def family_of(config: ModelConfig) -> TensorFamily:
    return MlaTensors() if config.v4 is None else V4Tensors()
