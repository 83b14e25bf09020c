"""From router logits to chosen experts and their weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.ops import native


@dataclass(frozen=True)
class GateRule:
    """How logits choose experts and give them weights, after Gate in DeepSeek-V3's inference/model.py."""

    # "sigmoid": scores = sigmoid(logits), a group's score is the sum of its two best. "softmax" and "softmax_topk":
    # scores = softmax over all experts, a group's score is its best.
    scoring: str
    top_k: int
    n_group: int
    topk_group: int  # experts are chosen from the best topk_group of n_group groups
    norm_topk_prob: bool  # weights are the scores divided by their sum, else the scores
    routed_scaling_factor: float  # both times this


def gate_topk(
    logits_TE: Tensor, bias_E: Tensor | None, rule: GateRule, token_id_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(weights_TK fp32, expert_idx_TK int64), best expert first, ties to the lowest index.

    logits_TE: fp32.
    bias_E: fp32; shifts the choice of groups and experts, never the weights.
    token_id_T: a negative id marks a padding row, whose experts are all -1.
    """
    top_k, n_group, topk_group = rule.top_k, rule.n_group, rule.topk_group
    num_tokens, num_experts = logits_TE.shape
    if logits_TE.dtype != torch.float32:
        raise ValueError(f"gate logits are {logits_TE.dtype}; they must be float32")
    if bias_E is not None and (bias_E.dtype != torch.float32 or tuple(bias_E.shape) != (num_experts,)):
        raise ValueError(f"gate bias is {bias_E.dtype} {tuple(bias_E.shape)}; it must be float32 ({num_experts},)")
    group_size, remainder = divmod(num_experts, n_group)
    if remainder or not 1 <= topk_group <= n_group or not 1 <= top_k <= topk_group * group_size:
        raise ValueError(
            f"cannot choose {top_k} of {num_experts} experts from {topk_group} of {n_group} groups: groups must be "
            "equally large, and the kept ones large enough"
        )
    weights_TK = torch.empty(num_tokens, top_k)
    expert_idx_TK = torch.empty(num_tokens, top_k, dtype=torch.int64)
    native.load().gate_topk(
        logits_TE.contiguous(),
        None if bias_E is None else bias_E.contiguous(),
        rule.scoring == "sigmoid",
        n_group,
        topk_group,
        rule.norm_topk_prob,
        rule.routed_scaling_factor,
        weights_TK,
        expert_idx_TK,
        torch.get_num_threads(),
    )
    if token_id_T is not None:
        expert_idx_TK.masked_fill_(token_id_T.view(-1, 1) < 0, -1)
    return weights_TK, expert_idx_TK


def gate_slots(
    logits_TE: Tensor, bias_E: Tensor | None, rule: GateRule, token_id_T: Tensor | None, slot_L: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights_TK, expert_idx_TK) of gate_topk, and slot_idx_TK, where every expert has one slot.

    slot_L: int64 [experts + 1], the slot of each expert; the last is for index -1, and -1.
    """
    weights_TK, expert_idx_TK = gate_topk(logits_TE, bias_E, rule, token_id_T)
    return weights_TK, expert_idx_TK, slot_L[expert_idx_TK]
