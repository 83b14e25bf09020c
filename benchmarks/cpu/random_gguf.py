"""A GGUF file of random weights in the shape of a DeepSeek V2 or V3 config.json, for measuring llama.cpp.

The format is ggml's (docs/gguf.md there, version 3); names and shapes are those that llama.cpp's deepseek2 architecture
loads. The file has no tokenizer: llama-bench and llama-batched-bench feed random token ids. Knows no benchmark.
"""

import os
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_ALIGNMENT = 32
_U32, _F32, _BOOL, _STRING = 4, 6, 7, 8  # types of metadata values
_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's expert gating functions
# llama.cpp puts matrices of q8_0 into its AMX buffers, but multiplies only contiguous rows there: for absorbed queries
# it then finds no backend, and aborts.
_KEPT_IN_BF16 = ("attn_k_b.weight", "attn_v_b.weight")
_TEMPLATE_BYTES = 1 << 26  # of random weights, of which every matrix repeats a part


@dataclass(frozen=True)
class GgmlType:
    """One of ggml's tensor types."""

    number: int
    block: int  # elements of a block
    block_bytes: int

    def num_bytes(self, elements: int) -> int:
        return elements // self.block * self.block_bytes


FLOAT32 = GgmlType(0, 1, 4)
MATRIX_TYPES = {"q8_0": GgmlType(8, 32, 34), "bf16": GgmlType(30, 1, 2)}


@dataclass(frozen=True)
class GgmlTensor:
    """Name, shape and place of one tensor."""

    name: str
    shape: tuple[int, ...]  # innermost dimension first, as ggml counts
    kind: GgmlType
    offset: int  # bytes from the start of the data

    @property
    def num_bytes(self) -> int:
        return self.kind.num_bytes(int(np.prod(self.shape)))


def metadata(config: Mapping[str, Any], num_layers: int) -> dict[str, int | float | str | bool]:
    """What llama.cpp reads of a deepseek2 model, by key."""
    c, rope = config, config["rope_scaling"]
    latent, rotated = c["kv_lora_rank"], c["qk_rope_head_dim"]
    values = {
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "block_count": num_layers,
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": 1,  # latent attention reads one key for all heads
        "attention.layer_norm_rms_epsilon": float(c["rms_norm_eps"]),
        "attention.q_lora_rank": c["q_lora_rank"] or 0,
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": c["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": c["v_head_dim"],
        "rope.freq_base": float(c["rope_theta"]),
        "rope.dimension_count": rotated,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        "leading_dense_block_count": c["first_k_dense_replace"],
        "expert_count": c["n_routed_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_weights_scale": float(c["routed_scaling_factor"]),
        "expert_weights_norm": c["norm_topk_prob"],
        "expert_gating_func": _SIGMOID if c["scoring_func"] == "sigmoid" else _SOFTMAX,
        "vocab_size": c["vocab_size"],
    }
    named = {f"deepseek2.{key}": value for key, value in values.items()}
    return {"general.architecture": "deepseek2", "tokenizer.ggml.model": "no_vocab", **named}


def tensor_shapes(config: Mapping[str, Any], num_layers: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Name, shape (innermost dimension first), and whether it is a matrix of the chosen type; others are float32."""
    c = config
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    yield "token_embd.weight", (hidden, vocab), True
    yield "output_norm.weight", (hidden,), False
    yield "output.weight", (hidden, vocab), True
    for layer in range(num_layers):
        yield from _attention(f"blk.{layer}.", c)
        yield f"blk.{layer}.ffn_norm.weight", (hidden,), False
        if layer < c["first_k_dense_replace"]:
            yield from _swiglu(f"blk.{layer}.ffn_", "", hidden, c["intermediate_size"])
            continue
        inner, experts = c["moe_intermediate_size"], c["n_routed_experts"]
        yield f"blk.{layer}.ffn_gate_inp.weight", (hidden, experts), False
        yield from _swiglu(f"blk.{layer}.ffn_", "_exps", hidden, inner, experts)
        yield from _swiglu(f"blk.{layer}.ffn_", "_shexp", hidden, inner * c["n_shared_experts"])


def _attention(prefix: str, c: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    hidden, heads, latent = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rotated, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    yield f"{prefix}attn_norm.weight", (hidden,), False
    if c["q_lora_rank"]:
        yield f"{prefix}attn_q_a_norm.weight", (c["q_lora_rank"],), False
        yield f"{prefix}attn_q_a.weight", (hidden, c["q_lora_rank"]), True
        yield f"{prefix}attn_q_b.weight", (c["q_lora_rank"], heads * (nope + rotated)), True
    else:
        yield f"{prefix}attn_q.weight", (hidden, heads * (nope + rotated)), True
    yield f"{prefix}attn_kv_a_norm.weight", (latent,), False
    yield f"{prefix}attn_kv_a_mqa.weight", (hidden, latent + rotated), True
    yield f"{prefix}attn_k_b.weight", (nope, latent, heads), True
    yield f"{prefix}attn_v_b.weight", (latent, value, heads), True
    yield f"{prefix}attn_output.weight", (heads * value, hidden), True


def _swiglu(
    prefix: str, suffix: str, hidden: int, inner: int, experts: int = 0
) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    stack = (experts,) if experts else ()
    yield f"{prefix}gate{suffix}.weight", (hidden, inner, *stack), True
    yield f"{prefix}up{suffix}.weight", (hidden, inner, *stack), True
    yield f"{prefix}down{suffix}.weight", (inner, hidden, *stack), True


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _value(value: int | float | str | bool) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    return struct.pack("<I", _STRING) + _string(value)


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def _template(kind: GgmlType) -> bytes:
    """Random weights with a standard deviation of about 0.02."""
    rng, blocks = np.random.default_rng(0), _TEMPLATE_BYTES // kind.block_bytes
    if kind.block == 1:
        values = (rng.standard_normal(blocks, dtype=np.float32) * 0.02).view(np.uint32)
        return (values >> 16).astype(np.uint16).tobytes()
    block = np.zeros(blocks, np.dtype([("scale", np.float16), ("values", np.int8, kind.block)]))
    block["scale"] = 0.02 / 73  # 73: the standard deviation of the values
    block["values"] = rng.integers(-127, 128, (blocks, kind.block), dtype=np.int8)
    return block.tobytes()


def write_gguf(path: Path, config: Mapping[str, Any], num_layers: int, matrix_type: str, threads: int = 8) -> int:
    """Writes the file, matrices in matrix_type (q8_0 or bf16); returns its size in bytes."""
    tensors: list[GgmlTensor] = []
    offset = 0
    for name, shape, is_matrix in tensor_shapes(config, num_layers):
        kind = FLOAT32 if not is_matrix else MATRIX_TYPES["bf16" if name.endswith(_KEPT_IN_BF16) else matrix_type]
        tensors.append(GgmlTensor(name, shape, kind, offset))
        offset = _aligned(offset + tensors[-1].num_bytes)
    keys = metadata(config, num_layers)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys))
    head += b"".join(_string(key) + _value(value) for key, value in keys.items())
    for t in tensors:
        head += _string(t.name) + struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *t.shape)
        head += struct.pack("<IQ", t.kind.number, t.offset)
    data_start = _aligned(len(head))
    templates = {kind: memoryview(_template(kind)) for kind in {t.kind for t in tensors} - {FLOAT32}}
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.ftruncate(file, data_start + offset)
    os.pwrite(file, head, 0)

    def write(t: GgmlTensor) -> None:
        if t.kind is FLOAT32:
            # Ones for the norms; a gate that prefers no expert by much.
            values = np.random.default_rng(len(t.name)).standard_normal(int(np.prod(t.shape)), dtype=np.float32)
            os.pwrite(
                file, (np.ones_like(values) if len(t.shape) == 1 else values * 0.02).tobytes(), data_start + t.offset
            )
            return
        template, done = templates[t.kind], 0
        while done < t.num_bytes:
            done += os.pwrite(file, template[: t.num_bytes - done], data_start + t.offset + done)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, tensors))
    os.close(file)
    return data_start + offset
