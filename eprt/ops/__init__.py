"""CPU operators. Each has a slow oracle of the same signature in reference.py and kernels in csrc/cpu."""

from eprt.ops.attention import cache_insert, mla_decode, mla_extend
from eprt.ops.elementwise import add_rms_norm, rms_norm, rope_half, rope_interleaved, silu_mul
from eprt.ops.gate import gate_topk
from eprt.ops.linear import grouped_experts, linear
from eprt.ops.weight import Weight, quantize_fp8, quantize_int8

__all__ = [
    "Weight",
    "add_rms_norm",
    "cache_insert",
    "gate_topk",
    "grouped_experts",
    "linear",
    "mla_decode",
    "mla_extend",
    "quantize_fp8",
    "quantize_int8",
    "rms_norm",
    "rope_half",
    "rope_interleaved",
    "silu_mul",
]
