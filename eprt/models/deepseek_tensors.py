"""Which tensors a DeepSeek checkpoint must hold, and whether these files do.

Names and shapes as transformers saves them (deepseek-ai/DeepSeek-V3 README_WEIGHTS.md). Every rank checks all
names and shapes, from the headers alone, so that all ranks refuse a bad checkpoint with the same message.
"""

import re
from collections.abc import Container, Iterator
from pathlib import Path

from eprt.config import IndexerConfig, ModelConfig
from eprt.models.checkpoint import FP8, SCALE_SUFFIX, Checkpoint, CheckpointError
from eprt.ops.weight import BLOCK

Shape = tuple[int, ...]
Kind = tuple[Shape, bool]  # of a tensor: its shape, and whether it may be fp8
FLOATS = ("F32", "BF16", "F16")
SCALES = (*FLOATS, "F8_E8M0")  # ue8m0: powers of two
# Saved by old versions of transformers; computed here.
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")
_MOST_LISTED = 40  # of wrong tensors: a checkpoint of another model has tens of thousands
_SHARED_WITH_MTP = (".embed_tokens.weight", ".shared_head.head.weight")


def expected_tensors(config: ModelConfig, mtp: bool = False) -> dict[str, Kind]:
    """Every tensor of the whole model, each expert's apart, and of its first MTP layer if wanted."""
    c = config
    expected: dict[str, Kind] = {
        "model.embed_tokens.weight": ((c.vocab_size, c.hidden_size), False),
        "model.norm.weight": ((c.hidden_size,), False),
    }
    if not c.tie_word_embeddings:
        expected["lm_head.weight"] = ((c.vocab_size, c.hidden_size), False)
    for layer in range(c.num_hidden_layers + mtp):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            expected[f"{prefix}{norm}.weight"] = ((c.hidden_size,), False)
        expected.update(_attention(c, prefix + "self_attn."))
        mlp = prefix + "mlp."
        expected.update(_moe(c, mlp) if c.is_moe_layer(layer) else _swiglu(mlp, c.hidden_size, c.intermediate_size))
    if mtp:
        prefix = f"model.layers.{c.num_hidden_layers}."
        expected[f"{prefix}eh_proj.weight"] = ((c.hidden_size, 2 * c.hidden_size), True)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            expected[f"{prefix}{norm}.weight"] = ((c.hidden_size,), False)
    return expected


def _attention(c: ModelConfig, prefix: str) -> Iterator[tuple[str, Kind]]:
    heads = c.num_attention_heads
    q_out = heads * c.qk_head_dim
    if c.q_lora_rank is None:
        yield f"{prefix}q_proj.weight", ((q_out, c.hidden_size), True)
    else:
        yield f"{prefix}q_a_proj.weight", ((c.q_lora_rank, c.hidden_size), True)
        yield f"{prefix}q_a_layernorm.weight", ((c.q_lora_rank,), False)
        yield f"{prefix}q_b_proj.weight", ((q_out, c.q_lora_rank), True)
    yield f"{prefix}kv_a_proj_with_mqa.weight", ((c.kv_dim, c.hidden_size), True)
    yield f"{prefix}kv_a_layernorm.weight", ((c.kv_lora_rank,), False)
    yield f"{prefix}kv_b_proj.weight", ((heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank), True)
    yield f"{prefix}o_proj.weight", ((c.hidden_size, heads * c.v_head_dim), True)
    if c.indexer is not None:
        yield from _indexer(c, c.indexer, f"{prefix}indexer.")
    if c.attention_bias:
        if c.q_lora_rank is not None:
            yield f"{prefix}q_a_proj.bias", ((c.q_lora_rank,), False)
        yield f"{prefix}kv_a_proj_with_mqa.bias", ((c.kv_dim,), False)
        yield f"{prefix}o_proj.bias", ((c.hidden_size,), False)


def _indexer(c: ModelConfig, indexer: IndexerConfig, prefix: str) -> Iterator[tuple[str, Kind]]:
    assert c.q_lora_rank is not None
    yield f"{prefix}wq_b.weight", ((indexer.num_heads * indexer.head_dim, c.q_lora_rank), True)
    yield f"{prefix}wk.weight", ((indexer.head_dim, c.hidden_size), True)
    yield f"{prefix}k_norm.weight", ((indexer.head_dim,), False)
    yield f"{prefix}k_norm.bias", ((indexer.head_dim,), False)
    yield f"{prefix}weights_proj.weight", ((indexer.num_heads, c.hidden_size), False)


def _swiglu(prefix: str, hidden: int, intermediate: int) -> Iterator[tuple[str, Kind]]:
    yield f"{prefix}gate_proj.weight", ((intermediate, hidden), True)
    yield f"{prefix}up_proj.weight", ((intermediate, hidden), True)
    yield f"{prefix}down_proj.weight", ((hidden, intermediate), True)


def _moe(c: ModelConfig, prefix: str) -> Iterator[tuple[str, Kind]]:
    assert c.moe is not None
    yield f"{prefix}gate.weight", ((c.moe.num_experts, c.hidden_size), False)
    if c.moe.scoring == "sigmoid":
        yield f"{prefix}gate.e_score_correction_bias", ((c.moe.num_experts,), False)
    for expert in range(c.moe.num_experts):
        yield from _swiglu(f"{prefix}experts.{expert}.", c.hidden_size, c.moe.intermediate_size)
    if c.moe.shared_intermediate_size:
        yield from _swiglu(f"{prefix}shared_experts.", c.hidden_size, c.moe.shared_intermediate_size)


def check_mtp(config: ModelConfig, model_dir: str | Path) -> None:
    """CheckpointError where config.json has no layer to draft with."""
    if not config.num_nextn_predict_layers:
        raise CheckpointError(_no_mtp(model_dir, "num_nextn_predict_layers is 0 in its config.json"))


def _no_mtp(model_dir: str | Path, why: str) -> str:
    return f"{model_dir} has no MTP layer to draft with ({why}); leave --num-speculative-tokens at 0"


def check_tensors(config: ModelConfig, checkpoint: Checkpoint, mtp: bool = False) -> None:
    """CheckpointError listing the missing, extra, mis-shaped and unreadable tensor. mtp: the MTP layer is needed."""
    layer = f"model.layers.{config.num_hidden_layers}."
    if mtp and not any(name.startswith(layer) for name in checkpoint.tensors):
        why = f"config.json declares one, but the files hold no {layer}*: some conversions to bf16 leave it out"
        raise CheckpointError(_no_mtp(checkpoint.model_dir, why))
    expected = expected_tensors(config, mtp)
    problems: list[str] = []
    scales = set()
    for name, (shape, may_be_fp8) in expected.items():
        is_fp8 = may_be_fp8 and checkpoint.is_fp8(name)
        problems += check_tensor(checkpoint, name, shape, (FP8,) if is_fp8 else FLOATS)
        if is_fp8:
            scales.add(name + SCALE_SUFFIX)
            blocks = tuple(-(-size // BLOCK) for size in shape)
            problems += check_tensor(checkpoint, name + SCALE_SUFFIX, blocks, SCALES, ", the scales of an fp8 matrix")
    for name, info in checkpoint.tensors.items():
        is_known = name in expected or name in scales or is_skipped(config, name, checkpoint.tensors, mtp)
        # Without shared experts transformers saves theirs with no rows.
        if not is_known and 0 not in info.shape:
            problems.append(f"extra: {name} {list(info.shape)} ({info.file.name})")
    refuse_problems(checkpoint, problems)


def refuse_problems(checkpoint: Checkpoint, problems: list[str]) -> None:
    """CheckpointError that lists them, where there are any."""
    if problems:
        more = len(problems) - _MOST_LISTED
        listed = [*problems[:_MOST_LISTED], f"... and {more} more"] if more > 0 else problems
        raise CheckpointError(
            f"{checkpoint.model_dir} does not hold the model its config.json describes; {len(problems)} tensors are "
            "wrong:\n  " + "\n  ".join(listed)
        )


def is_skipped(config: ModelConfig, name: str, names: Container[str], mtp: bool = False) -> bool:
    """Tensors that are known and not needed: MTP layers, but of the first, if it is needed, only its copies of what is
    the model's own; computed buffers; the head of a model that ties it.

    names: all tensors of the checkpoint. Some bf16 conversions keep the MTP layer, but say in config.json that there is
        none: a layer beyond the last is one if it has the projection that only MTP layers have.
    """
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is not None:
        beyond = int(layer[1]) - config.num_hidden_layers
        is_needed = mtp and beyond == 0 and not name.endswith(_SHARED_WITH_MTP)
        is_mtp = beyond < config.num_nextn_predict_layers or f"{layer[0]}eh_proj.weight" in names
        if beyond >= 0 and is_mtp and not is_needed:
            return True
    return bool(_COMPUTED.search(name)) or (config.tie_word_embeddings and name == "lm_head.weight")


def check_tensor(
    checkpoint: Checkpoint, name: str, shape: Shape, dtypes: tuple[str, ...], what: str = ""
) -> Iterator[str]:
    info = checkpoint.tensors.get(name)
    if info is None:
        yield f"missing: {name} {list(shape)}{what}"
        return
    if info.shape != shape:
        yield f"wrong shape: {name} is {list(info.shape)}, expected {list(shape)} ({info.file.name})"
    if info.dtype not in dtypes:
        yield f"wrong dtype: {name} is {info.dtype}, expected one of {', '.join(dtypes)} ({info.file.name})"
