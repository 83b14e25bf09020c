"""How many bytes a DeepSeek model's weights take on a rank, known from the files' headers, before anything is read.

The arithmetic of deepseek_builder.py: what each tensor becomes. Knows nothing of caches and of communication.
"""

from collections.abc import Iterator

from eprt.config import EngineConfig, ModelConfig
from eprt.layers.experts import expert_bytes
from eprt.layers.linear import padded_intermediate_size
from eprt.models.checkpoint import TensorSource
from eprt.models.deepseek_tensors import expected_tensors
from eprt.ops.weight import BLOCK

_FLOAT32 = 4
_SWIGLU = ("gate_proj", "up_proj", "down_proj")


class WeightMemory:
    """Args: checkpoint: whose headers tell the formats of the tensors."""

    def __init__(self, engine: EngineConfig, config: ModelConfig, checkpoint: TensorSource):
        self._engine, self._config, self._checkpoint = engine, config, checkpoint
        self._mtp = engine.num_speculative_tokens > 0

    def dense_bytes(self) -> int:
        """Of what every rank holds whole: attention, shared experts, embedding, head, and the table of rotations."""
        c = self._config
        weights = sum(self._tensor_bytes(name, shape) for name, (shape, _) in self._dense_tensors())
        num_positions = self._engine.max_model_len or c.max_position_embeddings
        return weights + num_positions * c.qk_rope_head_dim * _FLOAT32 + self._joined_biases()

    def expert_bytes(self, num_ranks: int) -> int:
        """Of the pools of a rank's experts, with its replicas and spare ones."""
        c, engine = self._config, self._engine
        if c.moe is None:
            return 0
        slots = -(-(c.moe.num_experts + engine.num_redundant_experts) // num_ranks)
        layers = [layer for layer in range(c.num_hidden_layers + self._mtp) if c.is_moe_layer(layer)]
        formats = [expert_format(engine, c, self._checkpoint, f"model.layers.{layer}.mlp.") for layer in layers]
        return sum(
            (formats.count(name) * slots + engine.spare_experts) * expert_bytes(c.moe, name) for name in set(formats)
        )

    def _dense_tensors(self) -> Iterator[tuple[str, tuple[tuple[int, ...], bool]]]:
        for name, kind in expected_tensors(self._config, self._mtp).items():
            if ".mlp.experts." not in name:
                yield name, kind

    def _tensor_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        part, itemsize = name.split(".")[-2], self._config.dtype.itemsize
        if name.endswith((".bias", "e_score_correction_bias")) or part == "k_norm":
            return shape[0] * _FLOAT32
        if part in ("gate", "weights_proj"):  # as they are in the files
            given = self._checkpoint.tensors[name]
            return given.num_bytes * (2 if given.dtype == "F16" else 1)
        if len(shape) == 1 or part in ("embed_tokens", "lm_head", "kv_b_proj"):
            return _product(shape) * itemsize
        if part in _SWIGLU:
            prefix = name.rpartition(f"{part}.")[0]
            weight_format = self._format_of(*(f"{prefix}{each}.weight" for each in _SWIGLU))
            shape = _padded(part, shape, weight_format)
        else:
            weight_format = self._format_of(name)
        return _matrix_bytes(shape, weight_format, itemsize)

    def _format_of(self, *names: str) -> str:
        if self._engine.quantization == "int8":
            return "int8"
        return "fp8" if all(map(self._checkpoint.is_fp8, names)) else "same"

    def _joined_biases(self) -> int:
        """Zeros for the part of a joined product that has no bias of its own."""
        c = self._config
        if not c.attention_bias or c.q_lora_rank is not None:
            return 0
        return (c.num_hidden_layers + self._mtp) * c.num_attention_heads * c.qk_head_dim * _FLOAT32


def expert_format(engine: EngineConfig, config: ModelConfig, checkpoint: TensorSource, prefix: str) -> str:
    """One format for all experts of a layer, those of other ranks included: the same on every rank."""
    assert config.moe is not None
    if engine.quantization == "int8":
        return "int8"
    experts = [f"{prefix}experts.{expert}." for expert in range(config.moe.num_experts)]
    return "fp8" if all(checkpoint.is_fp8(f"{each}{part}.weight") for each in experts for part in _SWIGLU) else "same"


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _padded(part: str, shape: tuple[int, ...], weight_format: str) -> tuple[int, ...]:
    rows, columns = shape
    if part == "down_proj":
        return rows, padded_intermediate_size(columns, weight_format)
    return padded_intermediate_size(rows, weight_format), columns


def _matrix_bytes(shape: tuple[int, ...], weight_format: str, itemsize: int) -> int:
    rows, columns = shape
    if weight_format == "fp8":
        return rows * columns + -(-rows // BLOCK) * -(-columns // BLOCK) * _FLOAT32
    if weight_format == "int8":
        return rows * columns + rows * _FLOAT32
    return rows * columns * itemsize
