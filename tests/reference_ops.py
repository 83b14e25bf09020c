"""Slow oracles of the CPU operators, in plain torch and fp32. Tests compare the kernels with them.

Each function has the signature of the operator that it checks, without the hints that do not change results.
"""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eprt.ops.attention import PagedContext
from eprt.ops.elementwise import Rotation
from eprt.ops.gate import GateRule
from eprt.ops.index_format import IndexFormat
from eprt.ops.kv_format import KVFormat
from eprt.ops.weight import Weight


def linear(x_MK: Tensor, w_NK: Weight, bias_N: Tensor | None = None) -> Tensor:
    y = x_MK.float() @ w_NK.dequantize().T
    if bias_N is not None:
        y = y + bias_N.float()
    return y.to(x_MK.dtype)


def grouped_experts(x_RH: Tensor, recv_count_E: Tensor, w13: Weight, w2: Weight, limit: float | None = None) -> Tensor:
    y_RH = torch.zeros(x_RH.shape[0], w2.shape[1], dtype=torch.float32)
    gate_up, down = w13.dequantize(), w2.dequantize()
    start = 0
    for e, count in enumerate(recv_count_E.tolist()):
        rows = x_RH[start : start + count].float()
        y_RH[start : start + count] = silu_mul(rows @ gate_up[e].T, limit) @ down[e].T
        start += count
    return y_RH.to(x_RH.dtype)


def int8_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [M, K], fp32 [M, 1])"""
    x = x_MK.float()
    scale_M1 = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-12)
    return (x * (1 / scale_M1)).round().to(torch.int8), scale_M1


def int8_linear(x_MK: Tensor, w_NK: Weight, bias_N: Tensor | None = None) -> Tensor:
    """Of GPUs, for int8 weights: x in int8 too, with a scale per row; sums of integers, exact in fp64."""
    assert w_NK.scale is not None
    data_MK, scale_M1 = int8_rows(x_MK)
    sum_MN = data_MK.double() @ w_NK.data.double().T
    y_MN = sum_MN.float() * w_NK.scale * scale_M1
    return y_MN if bias_N is None else y_MN + bias_N.float()


def int8_grouped_experts(
    x_RH: Tensor, recv_count_E: Tensor, w13: Weight, w2: Weight, limit: float | None = None
) -> Tensor:
    """Of GPUs, for int8 weights: rows in int8 in both products; silu(gate) * up is rounded to x's dtype before."""
    assert w13.scale is not None and w2.scale is not None
    y_RH = torch.zeros(x_RH.shape[0], w2.shape[1], dtype=torch.float32)
    start = 0
    for e, count in enumerate(recv_count_E.tolist()):
        rows = slice(start, start + count)
        h_RI = silu_mul(int8_linear(x_RH[rows], Weight(w13.data[e], w13.scale[e])), limit).to(x_RH.dtype)
        y_RH[rows] = int8_linear(h_RI, Weight(w2.data[e], w2.scale[e]))
        start += count
    return y_RH.to(x_RH.dtype)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    x = x_TH.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight_H.float()).to(x_TH.dtype)


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    sum_TH = x_TH + residual_TH
    return rms_norm(sum_TH, weight_H, eps), sum_TH


def silu_mul(x_TI2: Tensor, limit: float | None = None) -> Tensor:
    gate, up = x_TI2.float().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (F.silu(gate) * up).to(x_TI2.dtype)


def rope(x_TNR: Tensor, rotation: Rotation) -> Tensor:
    cos_T1R, sin_T1R = rotation.cos_sin_PR[rotation.position_T].float().unsqueeze(1).chunk(2, dim=-1)
    x = x_TNR.float()
    a, b = (x[..., 0::2], x[..., 1::2]) if rotation.interleaved else x.chunk(2, dim=-1)
    turned = a * cos_T1R - b * sin_T1R, b * cos_T1R + a * sin_T1R
    joined = torch.stack(turned, dim=-1).flatten(-2) if rotation.interleaved else torch.cat(turned, dim=-1)
    return joined.to(x_TNR.dtype)


def cache_insert(kv_pages: Tensor, kv_slot_T: Tensor, kv_TD: Tensor, rope_size: int = 0) -> None:
    entry = KVFormat(kv_TD.shape[1] - rope_size, rope_size, kv_pages.dtype)
    kv_pages.view(-1, kv_pages.shape[-1])[kv_slot_T.long()] = entry.encode(kv_TD)


def _gather_context(kv_pages: Tensor, page_table_P: Tensor, seq_len: int, latent: int, rope: int) -> Tensor:
    page_size = kv_pages.shape[1]
    pages = page_table_P[: -(-seq_len // page_size)].long()
    return KVFormat(latent, rope, kv_pages.dtype).decode(kv_pages[pages].flatten(0, 1)[:seq_len])


def mla_extend(
    q_nope_TNC: Tensor, q_rope_TNR: Tensor, context: PagedContext, w_kv_b: Tensor, softmax_scale: float
) -> Tensor:
    num_heads, nope = q_nope_TNC.shape[1:]
    lora, rope = w_kv_b.shape[1], q_rope_TNR.shape[-1]
    w_k, w_v = w_kv_b.float().view(num_heads, -1, lora).split([nope, w_kv_b.shape[0] // num_heads - nope], dim=1)
    out = torch.empty(q_nope_TNC.shape[0], num_heads, w_v.shape[1], dtype=torch.float32)
    assert context.query_start_B1 is not None
    starts = context.query_start_B1.tolist()
    for b, seq_len in enumerate(context.seq_len_B.tolist()):
        rows = slice(starts[b], starts[b + 1])
        entries = _gather_context(context.kv_pages, context.page_table_BP[b], seq_len, lora, rope)
        latent, k_rope = entries.split([lora, rope], dim=-1)
        k_nope = torch.einsum("sl,ncl->snc", latent, w_k)
        value = torch.einsum("sl,nvl->snv", latent, w_v)
        score = torch.einsum("tnc,snc->nts", q_nope_TNC[rows].float(), k_nope)
        score = (score + torch.einsum("tnr,sr->nts", q_rope_TNR[rows].float(), k_rope)) * softmax_scale
        position = torch.arange(seq_len - (rows.stop - rows.start), seq_len)
        score = score.masked_fill(torch.arange(seq_len) > position[:, None], float("-inf"))
        out[rows] = torch.einsum("nts,snv->tnv", score.softmax(-1), value)
    return out.to(q_nope_TNC.dtype)


def mla_decode(
    q_nope_BNC: Tensor, q_rope_BNR: Tensor, context: PagedContext, w_kv_b: Tensor, softmax_scale: float
) -> Tensor:
    one_each = replace(context, query_start_B1=torch.arange(q_nope_BNC.shape[0] + 1))
    return mla_extend(q_nope_BNC, q_rope_BNR, one_each, w_kv_b, softmax_scale)


def gate_topk(
    logits_TE: Tensor, bias_E: Tensor | None, rule: GateRule, given_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    scorings = {"sigmoid": torch.sigmoid, "sqrtsoftplus": lambda x: F.softplus(x.double()).sqrt().float()}
    scores_TE = scorings.get(rule.scoring, lambda x: x.softmax(-1))(logits_TE)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if rule.n_group > 1:
        grouped_TGE = choice_TE.unflatten(-1, (rule.n_group, -1))
        best = min(2, grouped_TGE.shape[-1]) if rule.scoring in scorings else 1
        group_score_TG = grouped_TGE.topk(best, dim=-1).values.sum(-1)
        kept_TG = torch.zeros_like(group_score_TG, dtype=torch.bool)
        kept_TG.scatter_(1, _largest(group_score_TG, rule.topk_group), True)
        choice_TE = grouped_TGE.masked_fill(~kept_TG.unsqueeze(-1), float("-inf")).flatten(1)
    expert_idx_TK = _largest(choice_TE, rule.top_k) if given_TK is None else given_TK
    weights_TK = scores_TE.gather(1, expert_idx_TK)
    if rule.norm_topk_prob:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * rule.routed_scaling_factor, expert_idx_TK


def _largest(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest of each row, largest first, ties to the lowest index (topk promises no order)."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def mask_tokens(logits_XV: Tensor, bits_YB: Tensor, row_Y: Tensor) -> Tensor:
    """A copy of the logits, changed."""
    logits_XV = logits_XV.clone()
    allowed_YV = np.unpackbits(bits_YB.numpy(), axis=1, count=logits_XV.shape[1], bitorder="little")
    for row, allowed_V in zip(row_Y.tolist(), allowed_YV):
        logits_XV[row, torch.from_numpy(allowed_V == 0)] = -torch.inf
    return logits_XV


def draw(logits_XV: Tensor, row_Y: np.ndarray, *, u: np.ndarray, **truncation: np.ndarray) -> Tensor:
    cdf_YV = draw_probs(logits_XV[torch.from_numpy(row_Y)], **truncation).cumsum(dim=-1, dtype=torch.float64)
    # The first token whose cumulative probability exceeds u: never one of probability 0.
    chosen_Y1 = torch.searchsorted(cdf_YV, torch.from_numpy(u)[:, None] * cdf_YV[:, -1:], right=True)
    return chosen_Y1.squeeze(1).clamp(max=cdf_YV.shape[1] - 1)


def draw_probs(
    logits_YV: Tensor, temperature: np.ndarray, min_p: np.ndarray, top_k: np.ndarray, top_p: np.ndarray
) -> Tensor:
    """What draw() draws from: the probabilities of kept tokens, which do not sum to 1, and 0 for the others."""
    # Subtract the largest logit first: a tiny temperature then underflows to probability 0, not to inf / inf.
    logits_YV = logits_YV - logits_YV.amax(dim=-1, keepdim=True)
    prob_YV = (logits_YV / torch.from_numpy(temperature)[:, None]).softmax(dim=-1)
    prob_YV.masked_fill_(prob_YV < prob_YV.amax(dim=-1, keepdim=True) * torch.from_numpy(min_p)[:, None], 0)
    for prob_V, k, p in zip(prob_YV, top_k.tolist(), top_p.tolist()):
        order_V = prob_V.sort(descending=True, stable=True).indices
        mass_K = prob_V[order_V[: k or None]].cumsum(0, dtype=torch.float64)
        num_kept = int((mass_K < p * mass_K[-1]).sum()) + 1
        prob_V[order_V[num_kept:]] = 0
    return prob_YV


def index_topk(
    query_TND: Tensor,
    weight_TN: Tensor,
    key_pages: Tensor,
    page_table_BP: Tensor,
    request_T: Tensor,
    length_T: Tensor,
    top_k: int,
) -> Tensor:
    """The slots of each query's best tokens, in order of position; of equal scores, those of the lower positions."""
    T, _, D = query_TND.shape
    slot_TK = torch.full((T, top_k), -1, dtype=torch.int32)
    page_size = key_pages.shape[1]
    for t in range(T):
        length, table_P = int(length_T[t]), page_table_BP[int(request_T[t])].long()
        position = torch.arange(length)
        slot = table_P[position // page_size] * page_size + position % page_size
        keys = IndexFormat.of_pages(D, key_pages).decode(key_pages.view(-1, key_pages.shape[2])[slot])
        score = (weight_TN[t][:, None] * torch.relu(query_TND[t].float() @ keys.T)).sum(0)
        order = score.sort(descending=True, stable=True).indices[:top_k]
        slot_TK[t, : len(order)] = slot[order.sort().values].int()
    return slot_TK
