"""Tokens per rank and per expert, put together from what the ranks report of their own slots."""

from collections.abc import Sequence

import msgspec

from eprt.engine.outputs import EngineStats
from eprt.serve.messages import EngineInfo


class LayerLoad(msgspec.Struct, frozen=True):
    """layer: model layer index. Tokens since the start. skew: the busiest rank's tokens over the mean; 1.0 is even."""

    layer: int
    per_rank: list[int]
    per_expert: list[int]
    skew: float


def expert_load(infos: Sequence[EngineInfo], stats: Sequence[EngineStats]) -> list[LayerLoad]:
    """One entry per MoE layer; empty until every rank has reported. infos, stats: in rank order."""
    if not infos or len(stats) < len(infos):
        return []
    return [_layer(row, layer, infos, stats) for row, layer in enumerate(infos[0].moe_layers)]


def _layer(row: int, layer: int, infos: Sequence[EngineInfo], stats: Sequence[EngineStats]) -> LayerLoad:
    per_expert = [0] * infos[0].num_experts
    per_rank = []
    for info, rank_stats in zip(infos, stats):
        loads = rank_stats.expert_load[row]
        per_rank.append(sum(loads))
        for expert, num_tokens in zip(info.expert_of_slot[row], loads):
            if expert >= 0:
                per_expert[expert] += num_tokens
    total = sum(per_rank)
    return LayerLoad(layer, per_rank, per_expert, max(per_rank) * len(per_rank) / total if total else 1.0)
