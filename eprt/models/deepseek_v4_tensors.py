"""Which tensors a DeepSeek V4 checkpoint must hold, and whether these files do.

Names and shapes as DeepSeek publishes them: no "model." in front, scales of quantised matrices as NAME.scale beside
NAME.weight. Knows nothing of what is computed from them.
"""

import re
from collections.abc import Container, Iterator
from pathlib import Path

from eprt.config import ModelConfig
from eprt.models.checkpoint import FP4, FP8, Checkpoint, CheckpointError
from eprt.models.deepseek_tensors import FLOATS, SCALES, Kind, Shape, check_tensor, refuse_problems
from eprt.models.tensor_family import TensorFamily
from eprt.ops.weight import BLOCK, FP4_BLOCK

_INTEGERS = ("I64", "I32")
_MTP = "mtp."
# Saved beside its own by a drafter that goes by the same prefix.
_OTHER_DRAFTER = re.compile(r"^mtp\.(?:[1-9]|\d+\.(?:dspark|markov|confidence))")


class V4Tensors(TensorFamily):
    """Of Flash and Pro."""

    matrices = "w1", "w3", "w2"

    def expected_tensors(self, config: ModelConfig, mtp: bool = False) -> dict[str, Kind]:
        c, v = config, config.v4
        assert v is not None
        expected: dict[str, Kind] = {
            "embed.weight": ((c.vocab_size, c.hidden_size), False),
            "norm.weight": ((c.hidden_size,), False),
            "head.weight": ((c.vocab_size, c.hidden_size), False),
            **dict(_head(c, "")),
        }
        for layer in range(c.num_hidden_layers + mtp):
            expected.update(_layer(c, layer))
        if mtp:
            prefix = f"{_MTP}0."
            for name in ("enorm", "hnorm", "norm"):
                expected[f"{prefix}{name}.weight"] = ((c.hidden_size,), False)
            for name in ("e_proj", "h_proj"):
                expected[f"{prefix}{name}.weight"] = ((c.hidden_size, c.hidden_size), True)
            expected.update(_head(c, prefix))
        return expected

    def check_mtp(self, config: ModelConfig, model_dir: str | Path) -> None:
        assert config.v4 is not None
        why = "num_nextn_predict_layers is 0 in its config.json"
        if config.num_nextn_predict_layers and not config.v4.drafter:
            return
        if config.v4.drafter:
            why = f"its drafter is {config.v4.drafter}, which is not implemented"
        raise CheckpointError(
            f"{model_dir} has no MTP layer to draft with ({why}); leave --num-speculative-tokens at 0: the model is "
            "served without drafts"
        )

    def check_tensors(self, config: ModelConfig, checkpoint: Checkpoint, mtp: bool = False) -> None:
        expected, problems, scales = self.expected_tensors(config, mtp), [], set()
        for name, (shape, may_be_quantised) in expected.items():
            stored = shape
            if may_be_quantised and checkpoint.is_quantised(name):
                scales.add(checkpoint.scale_name(name))
                stored, blocks = _stored_shapes(checkpoint, name, shape)
                dtypes = SCALES if checkpoint.is_fp8(name) else ("F8_E8M0",)
                problems += check_tensor(
                    checkpoint, checkpoint.scale_name(name), blocks, dtypes, ", the scales of a quantised matrix"
                )
            problems += check_tensor(checkpoint, name, stored, _dtypes(checkpoint, name, may_be_quantised))
        for name, info in checkpoint.tensors.items():
            known = name in expected or name in scales or self.is_skipped(config, name, checkpoint.tensors, mtp)
            if not known:
                problems.append(f"extra: {name} {list(info.shape)} ({info.file.name})")
        refuse_problems(checkpoint, problems)

    def is_skipped(self, config: ModelConfig, name: str, names: Container[str], mtp: bool = False) -> bool:
        """MTP layers, but of the first one, if it is needed, only what is another drafter's."""
        return name.startswith(_MTP) and (not mtp or _OTHER_DRAFTER.match(name) is not None)

    def mlp_prefix(self, config: ModelConfig, layer: int) -> str:
        return f"{layer_prefix(config, layer)}ffn."


def layer_prefix(config: ModelConfig, layer: int) -> str:
    beyond = layer - config.num_hidden_layers
    return f"layers.{layer}." if beyond < 0 else f"{_MTP}{beyond}."


def layer_ratio(config: ModelConfig, layer: int) -> int:
    """Of compression; an MTP layer has a window alone."""
    assert config.v4 is not None
    return config.v4.compress_ratios[layer] if layer < config.num_hidden_layers else 0


def _layer(c: ModelConfig, layer: int) -> Iterator[tuple[str, Kind]]:
    prefix, v = layer_prefix(c, layer), c.v4
    assert v is not None and c.moe is not None
    for norm in ("attn_norm", "ffn_norm"):
        yield f"{prefix}{norm}.weight", ((c.hidden_size,), False)
    for sublayer in ("attn", "ffn"):
        outputs = (2 + v.hc_mult) * v.hc_mult
        yield f"{prefix}hc_{sublayer}_fn", ((outputs, v.hc_mult * c.hidden_size), False)
        yield f"{prefix}hc_{sublayer}_base", ((outputs,), False)
        yield f"{prefix}hc_{sublayer}_scale", ((3,), False)
    yield from _attention(c, f"{prefix}attn.", layer_ratio(c, layer))
    gate = f"{prefix}ffn.gate."
    yield f"{gate}weight", ((c.moe.num_experts, c.hidden_size), False)
    if layer < v.num_hash_layers:
        yield f"{gate}tid2eid", ((c.vocab_size, c.moe.top_k), False)
    else:
        yield f"{gate}bias", ((c.moe.num_experts,), False)
    for expert in range(c.moe.num_experts):
        yield from _swiglu(f"{prefix}ffn.experts.{expert}.", c.hidden_size, c.moe.intermediate_size)
    if c.moe.shared_intermediate_size:
        yield from _swiglu(f"{prefix}ffn.shared_experts.", c.hidden_size, c.moe.shared_intermediate_size)


def _attention(c: ModelConfig, prefix: str, ratio: int) -> Iterator[tuple[str, Kind]]:
    v, head_dim, heads = c.v4, c.v_head_dim, c.num_attention_heads
    assert v is not None and c.q_lora_rank is not None
    yield f"{prefix}wq_a.weight", ((c.q_lora_rank, c.hidden_size), True)
    yield f"{prefix}q_norm.weight", ((c.q_lora_rank,), False)
    yield f"{prefix}wq_b.weight", ((heads * head_dim, c.q_lora_rank), True)
    yield f"{prefix}wkv.weight", ((head_dim, c.hidden_size), True)
    yield f"{prefix}kv_norm.weight", ((head_dim,), False)
    yield f"{prefix}wo_a.weight", ((v.o_groups * v.o_lora_rank, heads * head_dim // v.o_groups), True)
    yield f"{prefix}wo_b.weight", ((c.hidden_size, v.o_groups * v.o_lora_rank), True)
    yield f"{prefix}attn_sink", ((heads,), False)
    if ratio:
        yield from _compressor(c, f"{prefix}compressor.", ratio, head_dim)
    if ratio == 4:
        index = f"{prefix}indexer."
        yield f"{index}wq_b.weight", ((v.index_n_heads * v.index_head_dim, c.q_lora_rank), True)
        yield f"{index}weights_proj.weight", ((v.index_n_heads, c.hidden_size), False)
        yield from _compressor(c, f"{index}compressor.", ratio, v.index_head_dim)


def _compressor(c: ModelConfig, prefix: str, ratio: int, size: int) -> Iterator[tuple[str, Kind]]:
    channels = 2 * size if ratio == 4 else size
    for name in ("wkv", "wgate"):
        yield f"{prefix}{name}.weight", ((channels, c.hidden_size), False)
    yield f"{prefix}ape", ((ratio, channels), False)
    yield f"{prefix}norm.weight", ((size,), False)


def _swiglu(prefix: str, hidden: int, intermediate: int) -> Iterator[tuple[str, Kind]]:
    for name in ("w1", "w3"):
        yield f"{prefix}{name}.weight", ((intermediate, hidden), True)
    yield f"{prefix}w2.weight", ((hidden, intermediate), True)


def _head(c: ModelConfig, prefix: str) -> Iterator[tuple[str, Kind]]:
    assert c.v4 is not None
    yield f"{prefix}hc_head_fn", ((c.v4.hc_mult, c.v4.hc_mult * c.hidden_size), False)
    yield f"{prefix}hc_head_base", ((c.v4.hc_mult,), False)
    yield f"{prefix}hc_head_scale", ((1,), False)


def _stored_shapes(checkpoint: Checkpoint, name: str, shape: Shape) -> tuple[Shape, Shape]:
    """Of a quantised matrix in the file, and of its scales."""
    rows, columns = shape
    if checkpoint.tensors[name].dtype == FP4:
        return (rows, columns // 2), (rows, columns // FP4_BLOCK)
    return shape, (-(-rows // BLOCK), -(-columns // BLOCK))


def _dtypes(checkpoint: Checkpoint, name: str, may_be_quantised: bool) -> tuple[str, ...]:
    if name.endswith("tid2eid"):
        return _INTEGERS
    if not may_be_quantised:
        return FLOATS
    return (*FLOATS, FP8, FP4) if ".experts." in name else (*FLOATS, FP8)
