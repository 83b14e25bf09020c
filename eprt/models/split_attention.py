"""SplitAttention: attention layers of which a rank reads its heads alone (docs/attention-tp.md)."""

from typing import Protocol

import torch
from torch import Tensor

from eprt.config import ModelConfig
from eprt.layers.attention_team import AttentionTeam
from eprt.layers.head_shares import HeadShares
from eprt.layers.linear import JoinedLinear, Linear, as_format
from eprt.layers.mla import LATENT_NORM_EPS
from eprt.layers.norm import RMSNorm
from eprt.layers.split_mla import SplitMLA, SplitWeights
from eprt.models.checkpoint import TensorSource
from eprt.ops.weight import BLOCK, Weight


class LayerReader(Protocol):
    """What reads a layer's tensors: the model's builder."""

    cos_sin_PR: Tensor

    def linear(self, name: str) -> Linear: ...

    def norm(self, name: str, eps: float) -> RMSNorm: ...


class SplitAttention:
    """Before anything is read it says which rows of which tensors are this rank's."""

    def __init__(self, config: ModelConfig, checkpoint: TensorSource, team: AttentionTeam):
        self._config, self._checkpoint, self._team = config, checkpoint, team
        own = share_rows(config, team.shares, team.index)
        for name in list(checkpoint.tensors):
            part = name.split(".")[-2]
            if ".self_attn." in name and name.endswith((".weight", ".bias")) and part in own:
                checkpoint.keep_rows(name, own[part])

    def layer(self, reader: LayerReader, prefix: str) -> SplitMLA:
        c, has_lora = self._config, self._config.q_lora_rank is not None
        before = [reader.linear(f"{prefix}{name}") for name in ["q_a_proj"] * has_lora + ["kv_a_proj_with_mqa"]]
        o, o_bias_H = reader.linear(f"{prefix}o_proj"), None
        if not self._team.shares.gathers:
            o, o_bias_H = Linear(self._columns_of(o.weight)), o.bias_N
        weights = SplitWeights(
            before_heads=JoinedLinear(before),
            q_a_norm=reader.norm(f"{prefix}q_a_layernorm.weight", LATENT_NORM_EPS) if has_lora else None,
            q=reader.linear(f"{prefix}{'q_b_proj' if has_lora else 'q_proj'}"),
            kv_a_norm=reader.norm(f"{prefix}kv_a_layernorm.weight", LATENT_NORM_EPS),
            w_kv_b=as_format(self._checkpoint.read_weight(f"{prefix}kv_b_proj.weight"), "same", c.dtype).data,
            o=o,
            o_bias_H=o_bias_H,
        )
        return SplitMLA(c, weights, reader.cos_sin_PR, self._team)

    def _columns_of(self, o: Weight) -> Weight:
        """Those of this rank's heads."""
        width, heads = self._config.v_head_dim, self._team.heads
        columns = slice(heads.start * width, heads.stop * width)
        scale = o.scale
        if scale is not None and o.data.dtype == torch.float8_e4m3fn:
            scale = scale[:, columns.start // BLOCK : -(-columns.stop // BLOCK)].contiguous()
        return Weight(o.data[:, columns].contiguous(), scale)


def share_rows(config: ModelConfig, shares: HeadShares, index: int) -> dict[str, range]:
    """By the last part but one of a tensor's name: the rows of it that the rank reads, of a team's."""
    heads = shares.heads[index]
    queries, keys_values = config.qk_head_dim, config.qk_nope_head_dim + config.v_head_dim
    rows = {
        "q_proj": range(heads.start * queries, heads.stop * queries),
        "q_b_proj": range(heads.start * queries, heads.stop * queries),
        "kv_b_proj": range(heads.start * keys_values, heads.stop * keys_values),
    }
    return {**rows, "o_proj": shares.columns[index]} if shares.gathers else rows
