"""Slow oracles of DeepSeek V4's CPU operators, in plain torch and fp32."""

import torch
from torch import Tensor

from eprt.ops.shared_attention import SeenEntries, SeenTokens
from eprt.ops.streams import StreamProjection


def mix_streams(
    x_TMH: Tensor, p: StreamProjection, *, normalised: bool = True, turned: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """As the operator; streams that are not normalised, or mixed with the weights' transpose, are mistakes."""
    num, x = x_TMH.shape[1], x_TMH.float()
    flat = x.flatten(1)
    if normalised:
        flat = flat * (flat.square().mean(1, keepdim=True) + p.norm_eps).rsqrt()
    pre, post, comb = (flat @ p.fn_KW.T).split([num, num, num * num], dim=1)
    base_pre, base_post, base_comb = p.base_K.split([num, num, num * num])
    pre = (pre * p.scale[0] + base_pre).sigmoid() + p.eps
    post = 2 * (post * p.scale[1] + base_post).sigmoid()
    comb = (comb * p.scale[2] + base_comb).unflatten(1, (num, num)).softmax(2) + p.eps
    for i in range(p.num_iterations):
        comb = comb if not i else comb / (comb.sum(2, keepdim=True) + p.eps)
        comb = comb / (comb.sum(1, keepdim=True) + p.eps)
    comb = comb.transpose(1, 2) if turned else comb
    return (pre.unsqueeze(2) * x).sum(1).to(x_TMH.dtype), comb.transpose(1, 2) @ x, post


def collapse_streams(x_TMH: Tensor, p: StreamProjection) -> Tensor:
    flat = x_TMH.flatten(1).float()
    flat = flat * (flat.square().mean(1, keepdim=True) + p.norm_eps).rsqrt()
    weight_TM = (flat @ p.fn_KW.T * p.scale + p.base_K).sigmoid() + p.eps
    return (weight_TM.unsqueeze(2) * x_TMH.float()).sum(1).to(x_TMH.dtype)


def shared_attention(
    query_TND: Tensor, tokens: SeenTokens, entries: SeenEntries, sink_N: Tensor, scale: float
) -> Tensor:
    out_TND, size = torch.empty(query_TND.shape), entries.pages_PED.shape[1]
    for t, query_ND in enumerate(query_TND.float()):
        slots = torch.arange(int(entries.num_T[t]))
        if entries.slot_TK is not None:
            slots = entries.slot_TK[t, : len(slots)].long()
            page, offset = slots // size, slots % size
        else:
            page, offset = entries.table_BP[entries.request_T[t], slots // size].long(), slots % size
        local_XD = tokens.local_XD[int(tokens.begin_T[t]) : int(tokens.end_T[t])].float()
        keys_XD = torch.cat((local_XD, entries.pages_PED[page, offset].float()))
        scores = torch.cat((query_ND @ keys_XD.T * scale, sink_N[:, None]), dim=1).softmax(1)
        out_TND[t] = scores[:, :-1] @ keys_XD
    return out_TND


def pool_entries(state_S2C: Tensor, index_XR: Tensor, entry_size: int, first_slots: int) -> Tensor:
    parts = []
    for index_R in index_XR:
        rows = [
            state_S2C[i][:, :entry_size] if slot < first_slots else state_S2C[i][:, -entry_size:]
            for slot, i in enumerate(index_R.tolist())
            if i >= 0
        ]
        values, gates = torch.stack(rows).unbind(1)
        parts.append((values * gates.softmax(0)).sum(0))
    return torch.stack(parts) if parts else torch.empty(0, entry_size)
