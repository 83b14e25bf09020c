"""Floors of a decoding step: the least time that its bytes and its arithmetic take on one GPU.

floor: weights and cache entries over measured HBM bandwidth, plus the rows to and from other GPUs over NVLink's.
floor_tensor: the same, but attention takes the time of its bf16 operations, at the rate of a large product, where that
takes longer: 128 heads share every cache entry. Knows a model's configuration, and neither engine nor timer.
"""

from dataclasses import dataclass

FULL_DEPTH = 61  # layers of DeepSeek-V3
NVLINK_BYTES_PER_S = 450e9  # of one GPU, one way, NVLink 4


def full_depth(seconds: float, shallower_s: float | None, num_layers: int, fewer: int) -> float:
    """What 61 layers would take, of two measured depths."""
    if shallower_s is None:
        return seconds
    return seconds + (FULL_DEPTH - num_layers) * (seconds - shallower_s) / fewer


@dataclass(frozen=True)
class GpuRates:
    """What this GPU achieves."""

    hbm: float  # bytes per second
    tensor: float  # bf16 operations per second of a large product


def floor_seconds(
    model, requests: int, context: int, num_ranks: int, rates: GpuRates, entry_bytes: int | None = None
) -> tuple[float, float]:
    """(floor, floor_tensor) of a decoding step on one rank.

    Every weight is read once; of the experts, those that uniform routing chooses. entry_bytes: of a token in the cache
    of one layer; default bfloat16.
    """
    c = model.config
    heads, moe = c.num_attention_heads, c.moe
    projections = c.hidden_size * (c.q_lora_rank + c.kv_dim) + c.q_lora_rank * heads * c.qk_head_dim
    projections += heads * c.v_head_dim * c.hidden_size
    absorbed = 2 * heads * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank  # bf16
    chosen = 1 - (1 - moe.top_k / moe.num_experts) ** (requests * num_ranks)
    experts = 3 * c.hidden_size * moe.intermediate_size * chosen * moe.num_experts / num_ranks
    shared = 3 * c.hidden_size * moe.shared_intermediate_size
    num_dense = c.first_k_dense_replace
    num_moe = c.num_hidden_layers - num_dense
    weights = c.num_hidden_layers * (projections + absorbed) + num_dense * 3 * c.hidden_size * c.intermediate_size
    weights += num_moe * (experts + shared) + 2 * c.vocab_size * c.hidden_size
    entries = c.num_hidden_layers * requests * context
    sent_rows = requests * moe.top_k * (num_ranks - 1) / num_ranks
    exchanged = num_moe * sent_rows * c.hidden_size * (1 + 4 / 128 + 2)  # e4m3 with scales there, bf16 back
    cache_s = entries * (entry_bytes or c.kv_dim * 2) / rates.hbm
    attention_s = entries * 2 * heads * (c.kv_dim + c.kv_lora_rank) / rates.tensor
    rest_s = weights / rates.hbm + exchanged / NVLINK_BYTES_PER_S
    return rest_s + cache_s, rest_s + max(cache_s, attention_s)
