"""Expert load: tokens per rank and per expert, from what the ranks report. Knows nothing of windows or placements."""

from collections.abc import Sequence

import msgspec
import numpy as np

from eprt.engine.outputs import EngineStats
from eprt.serve.ranks.messages import EngineInfo


class LayerLoad(msgspec.Struct, frozen=True):
    """One MoE layer's tokens since the start."""

    layer: int  # model layer index
    per_rank: list[int]  # rows that each rank's experts received
    per_expert: list[int]  # how often each logical expert was chosen
    per_expert_prefill: list[int]  # how often in prefill
    skew: float  # the busiest rank's tokens over the mean; 1.0 is even


def total_load(infos: Sequence[EngineInfo], stats: Sequence[EngineStats]) -> np.ndarray | None:
    """int64 [2, L, E], all ranks' choices since the start, prefill and decode; None until every rank has reported."""
    if not infos or not infos[0].moe_layers or len(stats) < len(infos):
        return None
    shape = (2, len(infos[0].moe_layers), infos[0].num_experts)
    return np.sum([np.frombuffer(s.expert_tokens, dtype=np.int64) for s in stats], axis=0).reshape(shape)


def expert_load(infos: Sequence[EngineInfo], stats: Sequence[EngineStats]) -> list[LayerLoad]:
    """One entry per MoE layer; empty until every rank has reported. infos, stats: in rank order."""
    total_PLE = total_load(infos, stats)
    if total_PLE is None:
        return []
    layers = []
    for row, layer in enumerate(infos[0].moe_layers):
        per_rank = [rank.slot_tokens[row] for rank in stats]
        total = sum(per_rank)
        skew = max(per_rank) * len(per_rank) / total if total else 1.0
        prefill_E, decode_E = total_PLE[:, row]
        layers.append(LayerLoad(layer, per_rank, (prefill_E + decode_E).tolist(), prefill_E.tolist(), skew))
    return layers
