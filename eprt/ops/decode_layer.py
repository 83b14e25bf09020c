"""Half a decoder layer for a step of decodes, in one operator: attention between its norms, or all experts of a rank
alone. On CPUs only: bit for bit what the operators of the other modules give one after another, of which they spare the
calls, and loops that begin and end on many threads.

Knows nothing of layers and batches; layers/decode_attention.py and decode_experts.py say when these operators fit.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from eprt.ops import native
from eprt.ops.gate import SCORINGS, GateRule
from eprt.ops.weight import Weight

MOST_EXPERT_ROWS = 1024  # rows * experts per token of mix_decodes, kMostExpertRows of csrc/cpu/decode_layer.h
MOST_TOP_K = 64  # as kMostTopK there


def _contiguous(arguments: tuple) -> tuple:
    for each in arguments:
        if isinstance(each, Tensor) and not each.is_contiguous():
            raise ValueError(f"a weight {tuple(each.shape)} has strides {each.stride()}; call .contiguous() once")
    return arguments


@dataclass(frozen=True)
class NormedProjection:
    """(rms_norm(x)) W^T + bias."""

    norm_K: Tensor
    eps: float
    weight: Weight
    bias_N: Tensor | None  # fp32

    @property
    def arguments(self) -> tuple:
        return self.norm_K, self.eps, self.weight.data, self.weight.scale, self.bias_N


@dataclass(frozen=True)
class DecodeAttention:
    """What attend_decodes multiplies by; everything contiguous and on the CPU."""

    qkv_a: NormedProjection  # rows of the queries, or of their latents where there is a q_b, then of the cache entries
    q_b: NormedProjection | None  # of the queries' latents
    kv_norm_L: Tensor
    kv_eps: float
    cos_sin_PR: Tensor
    interleaved: bool
    w_kv_b: Tensor  # as of ops.mla_decode
    num_heads: int
    nope: int
    softmax_scale: float
    o: Weight
    o_bias_H: Tensor | None  # fp32
    next_norm_H: Tensor
    next_eps: float

    @property
    def arguments(self) -> tuple:
        q_b = (None, 0.0, None, None, None) if self.q_b is None else self.q_b.arguments
        cache = self.kv_norm_L, self.kv_eps, self.cos_sin_PR, self.interleaved
        heads = self.w_kv_b, self.num_heads, self.nope, self.softmax_scale
        behind = self.o.data, self.o.scale, self.o_bias_H, self.next_norm_H, self.next_eps
        return _contiguous((*self.qkv_a.arguments, *q_b, *cache, *heads, *behind))


class DecodeContext(NamedTuple):
    """Where the entries of a step's decodes go, and what they attend to: as the arguments of latent_insert and
    mla_decode, but of these types alone. Contiguous."""

    kv_pages: Tensor  # float32 or bfloat16
    kv_slot_T: Tensor  # int64
    position_T: Tensor  # int64
    page_table_TP: Tensor  # int32
    seq_len_T: Tensor  # int32


def attend_decodes(x_TH: Tensor, arguments: tuple, context: DecodeContext) -> tuple[Tensor, Tensor] | None:
    """(next_norm of the sum, x + attention(norm(x))), as the layer's operators give them: norm_linear, latent_insert,
    mla_decode, linear, add_rms_norm.

    x_TH: float32 or bfloat16, contiguous, one row per request.
    arguments: DecodeAttention.arguments.
    None, and nothing is written, where a slot, a position or a page is outside: those operators say which.
    """
    h_TH, sum_TH = torch.empty_like(x_TH), torch.empty_like(x_TH)
    bad = native.load().attend_decodes(x_TH, *arguments, *context, h_TH, sum_TH, torch.get_num_threads())
    return (h_TH, sum_TH) if bad < 0 else None


@dataclass(frozen=True)
class DecodeExperts:
    """What mix_decodes computes with; everything contiguous and on the CPU."""

    gate_EH: Tensor  # float32 or bfloat16
    bias_E: Tensor | None  # fp32, as of ops.gate_topk
    rule: GateRule
    slot_L: Tensor  # as of ops.gate_slots
    matrix_S: Tensor  # int32, the index of each slot's matrix in w13 and w2
    w13: Weight  # [M, 2I, H], not fp4
    w2: Weight  # [M, H, I]
    shared: tuple[Weight, Weight] | None  # w13 and w2 of the shared expert
    load_S: Tensor  # int64, counts the rows of each slot

    @cached_property
    def arguments(self) -> tuple:
        rule, shared = self.rule, self.shared or (None, None)
        how = SCORINGS[rule.scoring], rule.n_group, rule.topk_group, rule.norm_topk_prob, rule.routed_scaling_factor
        matrices = (
            part for w in (self.w13, self.w2, *shared) for part in ((None, None) if w is None else (w.data, w.scale))
        )
        slots = self.slot_L, self.matrix_S
        return _contiguous((self.gate_EH, self.bias_E, *how, *slots, *matrices, self.load_S))


class MixedDecodes(NamedTuple):
    """What came of mix_decodes."""

    y_TH: Tensor
    expert_idx_TK: Tensor  # int64, as of ops.gate_topk
    num_tokens: int  # that some expert got
    compute_ns: int  # in the routed experts


def mix_decodes(h_TH: Tensor, token_id_T: Tensor, experts: DecodeExperts) -> MixedDecodes:
    """experts(h) + shared expert(h): what gate_slots, grouped_experts, the sum weighted by the gate and silu_linear
    give, added in h's dtype.

    h_TH: float32 or bfloat16, contiguous; T * top_k <= MOST_EXPERT_ROWS.
    token_id_T: int64; where one is negative the row is padding and goes to no expert.
    ValueError where a chosen slot has no matrix.
    """
    y_TH = torch.empty_like(h_TH)
    expert_idx_TK = torch.empty(h_TH.shape[0], experts.rule.top_k, dtype=torch.int64)
    outputs = expert_idx_TK, y_TH, torch.get_num_threads()
    num_tokens, compute_ns = native.load().mix_decodes(h_TH, token_id_T, *experts.arguments, *outputs)
    if num_tokens < 0:
        slots, matrices = experts.slot_L.tolist(), experts.matrix_S.tolist()
        raise ValueError(f"slots {slots} of experts, one of which was chosen, have matrices {matrices}")
    return MixedDecodes(y_TH, expert_idx_TK, num_tokens, compute_ns)
