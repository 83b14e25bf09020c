"""Gate: which experts a token goes to, with which weights. fp32 throughout; ties go to the lowest index.

A row's choice depends on that row alone, so it is the same in any batch and on any number of ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from eprt import ops
from eprt.config import MoEConfig
from eprt.layers.linear import Linear, plain_weight
from eprt.ops.gate import GateRule


class RoutedTokens(NamedTuple):
    """What the gate chose for each token."""

    weights_TK: Tensor  # fp32
    expert_idx_TK: Tensor  # int64, logical experts; -1 in rows of padding
    slot_idx_TK: Tensor  # int64, the slots that these experts' tokens go to; -1 where the expert is


class Gate:
    """weight_EH: any floating dtype, kept as it is (bf16 times fp32 is exact). bias_E: V3's e_score_correction_bias.
    table_VK: int64, the experts of each token id (hash routing); the logits then only give their weights."""

    def __init__(
        self, config: MoEConfig, weight_EH: Tensor, bias_E: Tensor | None = None, table_VK: Tensor | None = None
    ):
        c, groups = config, (config.n_group, config.topk_group)
        if tuple(weight_EH.shape) != (want := (c.num_experts, c.hidden_size)):
            raise ValueError(f"gate weight has shape {tuple(weight_EH.shape)}, expected {want}")
        self.rule = GateRule(c.scoring, c.top_k, *groups, c.norm_topk_prob, c.routed_scaling_factor)
        self.linear = Linear(plain_weight(weight_EH.contiguous()))
        self.bias_E = None if bias_E is None else bias_E.float().contiguous()
        self.table_VK = None if table_VK is None else _checked_table(table_VK, c)

    def logits(self, x_TH: Tensor) -> Tensor:
        """fp32 [T, E]."""
        return self.linear(x_TH, torch.float32)

    def choose(self, logits_TE: Tensor, token_id_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(weights_TK fp32, expert_idx_TK int64), best expert first; -1 in rows whose token is negative: padding."""
        return ops.gate_topk(logits_TE, self.bias_E, self.rule, token_id_T, *self._given(token_id_T))

    def choose_slots(
        self, logits_TE: Tensor, token_id_T: Tensor | None, slot_L: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(weights_TK, expert_idx_TK) of choose, and slot_idx_TK: see ops.gate_slots."""
        return ops.gate_slots(logits_TE, self.bias_E, self.rule, token_id_T, slot_L, *self._given(token_id_T))

    def _given(self, token_id_T: Tensor | None) -> tuple[Tensor, ...]:
        """(experts of these tokens,), where a table gives them; of padding anyone's."""
        if self.table_VK is None:
            return ()
        if token_id_T is None:
            raise ValueError("a table gives the experts of each token id in this layer: pass input_ids")
        return (self.table_VK[token_id_T.clamp(min=0)],)


def _checked_table(table_VK: Tensor, config: MoEConfig) -> Tensor:
    """int64. ValueError unless each token id has top_k experts that there are."""
    if table_VK.dim() != 2 or table_VK.shape[1] != config.top_k or table_VK.is_floating_point():
        want = f"integers [vocabulary, {config.top_k}]"
        raise ValueError(f"the table of experts is {table_VK.dtype} {tuple(table_VK.shape)}, expected {want}")
    least, most = (int(each) for each in table_VK.aminmax())
    if least < 0 or most >= config.num_experts:
        raise ValueError(f"the table of experts names {least}..{most}; there are 0..{config.num_experts - 1}")
    return table_VK.to(torch.int64).contiguous()
