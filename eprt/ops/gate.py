"""From router logits to chosen experts and their weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.ops import native


@dataclass(frozen=True)
class GateRule:
    """How logits choose experts and give them weights, after Gate in DeepSeek-V3's inference/model.py."""

    # "sigmoid": scores = sigmoid(logits), a group's score is the sum of its two best. "sqrtsoftplus": likewise, with
    # scores = sqrt(softplus(logits)). "softmax" and "softmax_topk": scores = softmax over all experts, a group's score
    # is its best.
    scoring: str
    top_k: int
    n_group: int
    topk_group: int  # experts are chosen from the best topk_group of n_group groups
    norm_topk_prob: bool  # weights are the scores divided by their sum, else the scores
    routed_scaling_factor: float  # both times this


# As in gate.h.
SCORINGS = {"softmax": 0, "softmax_topk": 0, "sigmoid": 1, "sqrtsoftplus": 2}


def gate_topk(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    rule: GateRule,
    token_id_T: Tensor | None = None,
    given_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(weights_TK fp32, expert_idx_TK int64), best expert first, ties to the lowest index.

    logits_TE: fp32.
    bias_E: fp32; shifts the choice of groups and experts, never the weights.
    token_id_T: a negative id marks a padding row, whose experts are all -1.
    given_TK: int64, experts that are chosen already: they only get their weights, in this order.
    """
    weights_TK, expert_idx_TK, _ = _choose(logits_TE, bias_E, rule, token_id_T, given_TK, None)
    return weights_TK, expert_idx_TK


def _choose(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    rule: GateRule,
    token_id_T: Tensor | None,
    given_TK: Tensor | None,
    slot_L: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(weights_TK, expert_idx_TK) of gate_topk, and with slot_L the slots of these experts."""
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
    if given_TK is None:
        expert_idx_TK = torch.empty(num_tokens, top_k, dtype=torch.int64)
    else:
        expert_idx_TK = _checked_choice(given_TK, num_tokens, top_k, num_experts)
    slot_idx_TK = None if slot_L is None else torch.empty_like(expert_idx_TK)
    native.load().gate_topk(
        logits_TE.contiguous(),
        None if bias_E is None else bias_E.contiguous(),
        SCORINGS[rule.scoring],
        n_group,
        topk_group,
        rule.norm_topk_prob,
        rule.routed_scaling_factor,
        weights_TK,
        expert_idx_TK,
        given_TK is not None,
        None if token_id_T is None else _checked_ids(token_id_T, num_tokens),
        None if slot_L is None else _checked_slots(slot_L, num_experts),
        slot_idx_TK,
        torch.get_num_threads(),
    )
    return weights_TK, expert_idx_TK, slot_idx_TK


def _checked_ids(token_id_T: Tensor, num_tokens: int) -> Tensor:
    if token_id_T.numel() != num_tokens:
        raise ValueError(f"{token_id_T.numel()} token ids for {num_tokens} rows")
    return token_id_T.to(torch.int64).contiguous()


def _checked_slots(slot_L: Tensor, num_experts: int) -> Tensor:
    if slot_L.dtype != torch.int64 or tuple(slot_L.shape) != (num_experts + 1,):
        raise ValueError(f"slots are {slot_L.dtype} {tuple(slot_L.shape)}; they must be int64 ({num_experts + 1},)")
    return slot_L.contiguous()


def _checked_choice(given_TK: Tensor, num_tokens: int, top_k: int, num_experts: int) -> Tensor:
    """A copy. ValueError unless it is int64 [num_tokens, top_k], of experts that there are."""
    if given_TK.dtype != torch.int64 or tuple(given_TK.shape) != (num_tokens, top_k):
        want = f"must be int64 {(num_tokens, top_k)}"
        raise ValueError(f"given experts are {given_TK.dtype} {tuple(given_TK.shape)}; they {want}")
    if num_tokens and not (int(given_TK.min()) >= 0 and int(given_TK.max()) < num_experts):
        raise ValueError(
            f"given experts are from {int(given_TK.min())} to {int(given_TK.max())}; there are 0..{num_experts - 1}"
        )
    return given_TK.clone(memory_format=torch.contiguous_format)


def gate_slots(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    rule: GateRule,
    token_id_T: Tensor | None,
    slot_L: Tensor,
    given_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights_TK, expert_idx_TK) of gate_topk, and slot_idx_TK, where every expert has one slot.

    slot_L: int64 [experts + 1], the slot of each expert; the last is for index -1, and -1.
    """
    weights_TK, expert_idx_TK, slot_idx_TK = _choose(logits_TE, bias_E, rule, token_id_T, given_TK, slot_L)
    assert slot_idx_TK is not None
    return weights_TK, expert_idx_TK, slot_idx_TK
