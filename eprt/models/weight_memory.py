"""How many bytes a DeepSeek model's weights take on a rank, known from the files' headers, before anything is read.

The arithmetic of deepseek_builder.py: what each tensor becomes. Knows nothing of caches and of communication.
"""

from collections.abc import Iterator

from eprt.config import EngineConfig, ModelConfig
from eprt.layers.experts import expert_bytes
from eprt.layers.head_shares import HeadShares
from eprt.layers.linear import padded_intermediate_size
from eprt.models.checkpoint import FP4, FP8, TensorSource
from eprt.models.families import family_of
from eprt.models.split_attention import share_rows
from eprt.models.tensor_family import expert_number
from eprt.ops.weight import BLOCK

FLOAT32 = 4


class WeightMemory:
    """Args: checkpoint: whose headers tell the formats of the tensors."""

    def __init__(self, engine: EngineConfig, config: ModelConfig, checkpoint: TensorSource):
        self._engine, self._config, self._checkpoint = engine, config, checkpoint
        self._family, self._mtp = family_of(config), engine.num_speculative_tokens > 0
        self._shares = HeadShares.for_config(engine, config) if engine.attention_tp > 1 else None

    def dense_bytes(self) -> int:
        """Of what every rank holds: attention (with --attention-tp the largest share of its heads), shared experts,
        embedding, head, and the table of rotations."""
        weights = sum(self._tensor_bytes(name, shape) for name, (shape, _) in self._dense_tensors())
        return weights + self._rotation_bytes() + self._joined_biases()

    def _rotation_bytes(self) -> int:
        num_positions = self._engine.max_model_len or self._config.max_position_embeddings
        return num_positions * self._config.qk_rope_head_dim * FLOAT32

    def expert_bytes(self, num_ranks: int) -> int:
        """Of the pools of a rank's experts, with its replicas and spare ones."""
        c, engine = self._config, self._engine
        if c.moe is None:
            return 0
        slots = -(-(c.moe.num_experts + engine.num_redundant_experts) // num_ranks)
        layers = [layer for layer in range(c.num_hidden_layers + self._mtp) if c.is_moe_layer(layer)]
        formats = [expert_format(engine, c, self._checkpoint, layer) for layer in layers]
        return sum(
            (formats.count(name) * slots + engine.spare_experts) * expert_bytes(c.moe, name) for name in set(formats)
        )

    def _dense_tensors(self) -> Iterator[tuple[str, tuple[tuple[int, ...], bool]]]:
        for name, (shape, may_be_fp8) in self._family.expected_tensors(self._config, self._mtp).items():
            if expert_number(name) is None:
                yield name, (self._share_of(name, shape), may_be_fp8)

    def _share_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a tensor's shape, what the rank with most of it has."""
        shares = self._shares
        if shares is None or ".self_attn." not in name:
            return shape
        part = name.split(".")[-2]
        rows = [share_rows(self._config, shares, rank).get(part) for rank in range(shares.num_ranks)]
        if part == "o_proj" and not shares.gathers and len(shape) == 2:
            return shape[0], shares.most_heads * self._config.v_head_dim
        return (max(map(len, filter(None, rows))), *shape[1:]) if any(rows) else shape

    def _tensor_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        part, itemsize = name.split(".")[-2], self._config.dtype.itemsize
        if name.endswith((".bias", "e_score_correction_bias")) or part == "k_norm":
            return shape[0] * FLOAT32
        if part in ("gate", "weights_proj"):  # as they are in the files
            return self._bytes_in_file(name)
        if len(shape) == 1 or part in ("embed_tokens", "lm_head", "kv_b_proj"):
            return num_values(shape) * itemsize
        if part in self._family.matrices:
            return self._swiglu_bytes(name, shape)
        return matrix_bytes(shape, self._format_of(name), itemsize)

    def _bytes_in_file(self, name: str) -> int:
        """Of a tensor that stays as it is, but for float16."""
        given = self._checkpoint.tensors[name]
        return given.num_bytes * (2 if given.dtype == "F16" else 1)

    def _swiglu_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        """Of one of the three matrices of an MLP that every rank has."""
        matrices, part = self._family.matrices, name.split(".")[-2]
        prefix = name.rpartition(f"{part}.")[0]
        weight_format = self._format_of(*(f"{prefix}{each}.weight" for each in matrices))
        rows, columns = shape
        if part == matrices[-1]:
            columns = padded_intermediate_size(columns, weight_format)
        else:
            rows = padded_intermediate_size(rows, weight_format)
        return matrix_bytes((rows, columns), weight_format, self._config.dtype.itemsize)

    def _format_of(self, *names: str) -> str:
        if self._engine.quantization == "int8":
            return "int8"
        return "fp8" if all(map(self._checkpoint.is_fp8, names)) else "same"

    def _joined_biases(self) -> int:
        """Zeros for the part of a joined product that has no bias of its own."""
        c = self._config
        if not c.attention_bias or c.q_lora_rank is not None or self._shares is not None:
            return 0
        return (c.num_hidden_layers + self._mtp) * c.num_attention_heads * c.qk_head_dim * FLOAT32


def expert_format(engine: EngineConfig, config: ModelConfig, checkpoint: TensorSource, layer: int) -> str:
    """One format for all experts of a layer, those of other ranks included: the same on every rank."""
    assert config.moe is not None
    if engine.quantization == "int8":
        return "int8"
    family, experts = family_of(config), range(config.moe.num_experts)
    prefix = f"{family.mlp_prefix(config, layer)}experts."
    names = [f"{prefix}{expert}.{part}.weight" for expert in experts for part in family.matrices]
    formats = {checkpoint.tensors[name].dtype for name in names}
    return {FP8: "fp8", FP4: "fp4"}.get(formats.pop(), "same") if len(formats) == 1 else "same"


def num_values(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def matrix_bytes(shape: tuple[int, ...], weight_format: str, itemsize: int) -> int:
    rows, columns = shape
    if weight_format == "fp8":
        return rows * columns + -(-rows // BLOCK) * -(-columns // BLOCK) * FLOAT32
    if weight_format == "int8":
        return rows * columns + rows * FLOAT32
    return rows * columns * itemsize
