"""From router logits to chosen experts and their weights."""

from torch import Tensor

from eprt.ops import reference


def gate_topk(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    scoring: str,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """(weights_TK fp32, expert_idx_TK int64), best expert first, ties to the lowest index. logits_TE: fp32.

    scoring "sigmoid": scores = sigmoid(logits), group score = sum of its two best; "softmax" and "softmax_topk":
    softmax over all experts, group score = its best. bias_E (fp32) shifts the choice of groups and experts, never the
    weights. The best topk_group of n_group groups may be chosen from. Weights are scores, divided by their sum when
    norm_topk_prob, times routed_scaling_factor. (DeepSeek-V3 inference/model.py, Gate.)
    """
    return reference.gate_topk(
        logits_TE, bias_E, scoring, top_k, n_group, topk_group, norm_topk_prob, routed_scaling_factor
    )
