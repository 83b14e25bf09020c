"""From router logits to chosen experts: one program per token, with its scores in registers.

Scores lie there as [groups, experts of a group]. The choice equals that of eprt.ops.gate, ties to the lowest index
included. Knows nothing of tables that give a token's experts: these come chosen.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.gate import GateRule

_SOFTMAX, _SIGMOID, _SQRT_SOFTPLUS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_SCORINGS = {"softmax": 0, "softmax_topk": 0, "sigmoid": 1, "sqrtsoftplus": 2}


@triton.jit
def _first_largest(value, index, BOUND: tl.constexpr):
    """The lowest index of the largest value, of a vector or of a matrix."""
    return tl.min(tl.where(value == tl.max(value), index, BOUND))


@triton.jit
def _sqrt_softplus(x):
    """sqrt(log(1 + exp(x))), without overflow. For small t, log(1 + t) is t times what rounding 1 + t leaves right: see
    Goldberg, "What every computer scientist should know about floating-point arithmetic", theorem 4."""
    t = tl.exp(-tl.abs(x))
    u = 1.0 + t
    log1p = tl.where(u == 1.0, t, tl.log(u) * tl.div_rn(t, u - 1.0))
    return tl.sqrt_rn(tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p)


@triton.jit
def _scores(logit, SCORING: tl.constexpr):
    if SCORING == _SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logit))
    elif SCORING == _SQRT_SOFTPLUS:
        return _sqrt_softplus(logit)
    else:
        score = tl.exp(logit - tl.max(logit))
        return score / tl.sum(score)


@triton.jit
def _best_groups(
    choice, group, member, num_groups, group_size, TOP_GROUPS: tl.constexpr, SCORING: tl.constexpr, BOUND: tl.constexpr
):
    """Whether each group is one of the TOP_GROUPS best."""
    lowest: tl.constexpr = float("-inf")
    best = tl.max(choice, axis=1)
    if SCORING != _SOFTMAX:  # the sum of the two best
        place = tl.min(tl.where(choice == best[:, None], member[None, :], BOUND), axis=1)
        second = tl.max(tl.where(member[None, :] == place[:, None], lowest, choice), axis=1)
        best = best + tl.where(group_size > 1, second, 0.0)
    best = tl.where(group < num_groups, best, lowest)
    kept = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        kept = kept | (group == _first_largest(tl.where(kept, lowest, best), tl.where(kept, BOUND, group), BOUND))
    return kept


@triton.jit
def _gate_topk(
    weights,
    chosen,
    slots,
    slot_of_expert,
    logits,
    bias,
    token_id,
    given,
    num_experts,
    num_groups,
    group_size,
    scaling,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALISE: tl.constexpr,
    LIMITED: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group, member, slot = tl.arange(0, GROUPS), tl.arange(0, SIZE), tl.arange(0, K)
    exists = (group < num_groups)[:, None] & (member < group_size)[None, :]
    expert = group[:, None] * group_size + member[None, :]
    lowest: tl.constexpr = float("-inf")
    bound: tl.constexpr = 1 << 30
    logit = tl.load(logits + token * num_experts + expert, mask=exists, other=lowest)
    score = _scores(logit, SCORING)
    choice = score
    if bias is not None:
        choice += tl.load(bias + expert, mask=exists, other=0)
    # NaN sorts last, in order of index: a token always chooses different experts.
    choice = tl.where(exists & (choice == choice), choice, lowest)
    if LIMITED:
        kept = _best_groups(choice, group, member, num_groups, group_size, TOP_GROUPS, SCORING, bound)
        choice = tl.where(kept[:, None], choice, lowest)
    taken_score = tl.zeros([K], tl.float32)
    taken = tl.zeros([K], tl.int32)
    left = exists
    for k in tl.static_range(TOP_K):
        if given is None:
            which = _first_largest(tl.where(left, choice, lowest), tl.where(left, expert, bound), bound)
        else:
            which = tl.load(given + token * TOP_K + k).to(tl.int32)
        left = left & (expert != which)
        taken = tl.where(slot == k, which, taken)
        its_score = tl.sum(tl.where(exists & (expert == which), score, 0.0))
        taken_score = tl.where(slot == k, its_score, taken_score)
    if NORMALISE:
        taken_score = taken_score / (tl.sum(taken_score) + 1e-20)
    if token_id is not None:
        taken = tl.where(tl.load(token_id + token) < 0, -1, taken)
    at = token * TOP_K + slot
    tl.store(weights + at, taken_score * scaling, mask=slot < TOP_K)
    tl.store(chosen + at, taken.to(tl.int64), mask=slot < TOP_K)
    if slot_of_expert is not None:
        which = tl.where(taken < 0, num_experts, taken)
        tl.store(slots + at, tl.load(slot_of_expert + which, mask=slot < TOP_K, other=-1), mask=slot < TOP_K)


def gate_topk(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    rule: GateRule,
    token_id_T: Tensor | None = None,
    given_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As eprt.ops.gate.gate_topk; nothing is checked."""
    weights_TK, expert_idx_TK, _ = _launch(logits_TE, bias_E, rule, token_id_T, given_TK, None)
    return weights_TK, expert_idx_TK


def gate_slots(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    rule: GateRule,
    token_id_T: Tensor | None,
    slot_L: Tensor,
    given_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As eprt.ops.gate.gate_slots; nothing is checked."""
    return _launch(logits_TE, bias_E, rule, token_id_T, given_TK, slot_L)


def _launch(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    rule: GateRule,
    token_id_T: Tensor | None,
    given_TK: Tensor | None,
    slot_L: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights_TK, expert_idx_TK, slot_idx_TK); without slot_L no slots."""
    num_tokens, num_experts = logits_TE.shape
    weights_TK = torch.empty(num_tokens, rule.top_k, dtype=torch.float32, device=logits_TE.device)
    expert_idx_TK = torch.empty(num_tokens, rule.top_k, dtype=torch.int64, device=logits_TE.device)
    slot_idx_TK = expert_idx_TK if slot_L is None else torch.empty_like(expert_idx_TK)
    if num_tokens:
        group_size = num_experts // rule.n_group
        _gate_topk[(num_tokens,)](
            weights_TK,
            expert_idx_TK,
            slot_idx_TK,
            slot_L,
            logits_TE.contiguous(),
            bias_E,
            None if token_id_T is None else token_id_T.contiguous(),
            None if given_TK is None else given_TK.contiguous(),
            num_experts,
            rule.n_group,
            group_size,
            float(rule.routed_scaling_factor),
            TOP_K=rule.top_k,
            TOP_GROUPS=rule.topk_group,
            SCORING=_SCORINGS[rule.scoring],
            NORMALISE=rule.norm_topk_prob,
            LIMITED=given_TK is None and rule.topk_group < rule.n_group,
            GROUPS=triton.next_power_of_2(rule.n_group),
            SIZE=triton.next_power_of_2(group_size),
            K=triton.next_power_of_2(rule.top_k),
            num_warps=1,
        )
    return weights_TK, expert_idx_TK, slot_idx_TK
