"""SplitMLA: latent attention whose heads are spread over a team of ranks (docs/attention-tp.md).

Each rank has the weights of its heads alone: of the queries, of w_kv_b, and of the output projection either columns of
the output (form "gather") or its heads' part of all columns ("reduce"). What comes before the heads, and the cache
entry, a rank computes for its own tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eprt import ops
from eprt.config import ModelConfig
from eprt.layers.attention_team import AttentionTeam, TeamRows
from eprt.layers.batch import ForwardBatch
from eprt.layers.layer_cache import LayerCache
from eprt.layers.linear import JoinedLinear, Linear
from eprt.layers.mla import MLA, MLAWeights
from eprt.layers.norm import RMSNorm


@dataclass(frozen=True)
class SplitWeights:
    """before_heads and kv_a_norm are whole on each rank, the others are its share."""

    before_heads: JoinedLinear  # q_a_proj, where there is one, and kv_a_proj
    q_a_norm: RMSNorm | None  # None: queries come from the layer's input
    q: Linear  # q_b_proj or q_proj
    kv_a_norm: RMSNorm
    w_kv_b: Tensor
    o: Linear
    o_bias_H: Tensor | None  # fp32; form "reduce": added once, to the sum

    @property
    def head_bytes(self) -> int:
        """Of the share."""
        tensors = [self.w_kv_b, self.q.weight.data, self.q.weight.scale, self.o.weight.data, self.o.weight.scale]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class SplitMLA(MLA):
    def __init__(self, config: ModelConfig, weights: SplitWeights, cos_sin_PR: Tensor, team: AttentionTeam):
        # To MLA this rank's heads are all there are.
        own = replace(config, num_attention_heads=len(team.heads))
        w = weights
        super().__init__(own, MLAWeights(w.before_heads, w.q_a_norm, w.q, w.kv_a_norm, w.w_kv_b, w.o), cos_sin_PR)
        self.split, self.team = weights, team

    def __call__(
        self, x_TH: Tensor, norm: RMSNorm, batch: ForwardBatch, cache: LayerCache, plans: dict[str, Any] | None = None
    ) -> Tensor:
        plans = {} if plans is None else plans
        if (rows := plans.get("team")) is not None and rows.num_tokens == 0:
            return torch.empty_like(x_TH)
        w = self.split
        *q_TA, kv_TD = w.before_heads.of_norm(x_TH, norm)
        kv_norm, rotation = w.kv_a_norm, self._rotation(batch.position_T)
        ops.latent_insert(cache.latents, batch.kv_slot_T, kv_TD, kv_norm.weight_H, kv_norm.eps, rotation)
        if batch.meet is not None:
            batch.meet()
        rows = self._share_inputs(q_TA[0] if q_TA else x_TH, batch, rows, plans)
        if rows.num_tokens == 0:
            return torch.empty_like(x_TH)
        q_norm = norm if w.q_a_norm is None else w.q_a_norm
        queries = self._parts_of_heads(w.q.of_norm(self.team.inputs(rows), q_norm))
        heads_TW = self._attend(*queries, rows.batch, cache.latents, plans).flatten(1)
        return self._gather(heads_TW, rows) if self.team.shares.gathers else self._reduce(heads_TW, rows)

    def between(self, norm: RMSNorm, next_norm: RMSNorm) -> None:
        """Its ranks meet amid attention."""

    def _share_inputs(
        self, input_TA: Tensor, batch: ForwardBatch, rows: TeamRows | None, plans: dict[str, Any]
    ) -> TeamRows:
        """rows: None in the first layer of a batch."""
        team = self.team
        if rows is None:
            team.show_batch(batch)
        team.show_input(input_TA)
        team.meet()
        if rows is None:
            rows = plans["team"] = team.join_batches(batch)
            if rows.num_tokens == 0:
                team.meet()  # no other meeting follows before batches are shown again
        return rows

    def _gather(self, heads_TW: Tensor, rows: TeamRows) -> Tensor:
        """Each element of the output is one rank's sum, in the order that a rank alone has."""
        team = self.team
        team.show_heads(heads_TW)
        team.meet()
        team.show_output(self.split.o(team.all_heads(rows.num_tokens, self.config.v_head_dim)))
        team.meet()
        return torch.cat(team.outputs(rows), dim=1)

    def _reduce(self, heads_TW: Tensor, rows: TeamRows) -> Tensor:
        """Each rank's part is rounded to the model's type; their sum, in the order of the ranks, once more."""
        team = self.team
        team.show_output(self.split.o(heads_TW))
        team.meet()
        return _sum(team.outputs(rows), self.split.o_bias_H)


def _sum(parts: Sequence[Tensor], bias_H: Tensor | None) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    if bias_H is not None:
        total = total + bias_H
    return total.to(parts[0].dtype)
