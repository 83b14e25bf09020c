"""Gates as skewed as a real model's, and experts placed anew for them.

Dummy gates choose all experts about equally often. Here each layer's correction bias, which shifts choices and never
weights, is scaled until its busiest expert gets as many times the mean as wanted. Knows layers and the balancer, and
nothing of engines.
"""

from collections.abc import Sequence

import numpy as np
import torch
from eprt.balancer import plan
from torch import Tensor

from eprt import EPGroup
from eprt.ep.placement.slot_map import SlotMap
from eprt.layers.moe import EPMoE

_TOKENS, _HALVINGS, _LARGEST_SCALE = 4096, 14, 4.0


def skew_gates(layers: Sequence[EPMoE], skew: float) -> np.ndarray:
    """Makes the busiest expert of each layer `skew` times the mean; the same on every rank.

    Returns float64 [L, E], choices of each expert: of random hidden states, which dummy models have.
    """
    return np.stack([_skew_gate(moe, skew, seed) for seed, moe in enumerate(layers)])


@torch.inference_mode()
def _skew_gate(moe: EPMoE, skew: float, seed: int) -> np.ndarray:
    bias_E = None if moe.gate is None else moe.gate.e_score_correction_bias
    assert isinstance(bias_E, Tensor), "a gate with a correction bias"
    generator = torch.Generator().manual_seed(seed)
    hidden_TH = torch.randn(_TOKENS, moe.config.hidden_size, generator=generator).to(bias_E.device, moe.config.dtype)
    popularity_E = torch.randn(bias_E.shape, generator=generator).to(bias_E.device)
    logits_TE = moe.router_logits(hidden_TH)
    low, high = 0.0, _LARGEST_SCALE
    for _ in range(_HALVINGS):
        scale = (low + high) / 2
        bias_E.copy_(popularity_E * scale)
        count_E = _choices(moe, logits_TE)
        low, high = (scale, high) if max_over_mean(count_E) < skew else (low, scale)
    return count_E


def _choices(moe: EPMoE, logits_TE: Tensor) -> np.ndarray:
    expert_idx_TK = moe.route(logits_TE).expert_idx_TK
    return expert_idx_TK.flatten().bincount(minlength=moe.config.num_experts).double().cpu().numpy()


def max_over_mean(load: np.ndarray) -> float:
    """Of the last axis; the mean over the others."""
    return float((load.max(axis=-1) / load.mean(axis=-1).clip(1e-9)).mean())


@torch.inference_mode()
def rebalance(layers: Sequence[EPMoE], group: EPGroup, load_LE: np.ndarray) -> None:
    """Fills all slots by the balancer's plan for this load. Collective.

    A slot that was empty gets a copy of whatever weights its rank has: dummy weights are as good as any others.
    """
    num_slots = layers[0].slot_map.num_slots
    placement = plan(load_LE, num_slots=num_slots, num_gpus=group.size)
    for row, moe in enumerate(layers):
        weight_S = None if placement.slot_weight is None else placement.slot_weight[row]
        slot_map = SlotMap.from_row(
            placement.physical_to_logical_map[row], moe.config.num_experts, weight_S=weight_S, rank=group.rank
        )
        moe.place(slot_map, [buffer if buffer >= 0 else _copied_buffer(moe) for buffer in moe.weight_buffers()])


def _copied_buffer(moe: EPMoE) -> int:
    buffer, source = moe.pool.take_buffer(), max(moe.weight_buffers())
    for part in moe.pool.parts:
        part[buffer].copy_(part[source])
    return buffer
