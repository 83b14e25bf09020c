"""The V4 demo model's first weights, made from those of the V3 demo model.

Latent attention is attention with one key and value for all heads, once its products with the latent are carried out,
and equal streams whose mixture keeps their mean are one stream. So nearly all of the older model has its place here.
What has none is fitted on a few thousand tokens: the norm of queries, the gates, which score in another way, and the
dense layer, which is cut into experts. Compressors begin with the keys of single tokens, and small.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model import Attention as LatentAttention
from ..model import Gate as SigmoidGate
from ..model import MoE as GroupedMoE
from .attention import DemoV4Config
from .model import DemoV4Model, HyperConnection, StreamHead, StreamWeights

FIT_STEPS = 400


@torch.no_grad()
def inputs_of(teacher: Any, token_BL: Tensor) -> dict[nn.Module, Tensor]:
    """What each attention, feed-forward and the MTP layer's norm of hidden states get."""
    seen: dict[nn.Module, Tensor] = {}
    hooks = []
    for layer in teacher.model.layers:
        for module in (layer.self_attn, layer.mlp):
            hooks.append(module.register_forward_pre_hook(lambda m, args: seen.__setitem__(m, args[0].flatten(0, 1))))
    teacher.forward_mtp(teacher(token_BL), token_BL.roll(-1, 1))
    for hook in hooks:
        hook.remove()
    return seen


def warm_start(teacher: Any, token_BL: Tensor) -> DemoV4Model:
    """A model that computes nearly what the teacher (in fp32) does. token_BL: of training data."""
    model: Any = DemoV4Model(DemoV4Config())
    seen, old = inputs_of(teacher, token_BL), teacher.model
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, StreamWeights):
                _init_streams(module)
        model.embed.weight.copy_(old.embed_tokens.weight)
        model.head.weight.copy_(teacher.lm_head.weight)
        model.norm.weight.copy_(old.norm.weight)
    for layer, theirs in zip((*model.layers, model.mtp), old.layers):
        _copy_layer(layer, theirs, seen, token_BL.flatten())
    with torch.no_grad():
        mtp = old.layers[-1]
        embedded, hidden = mtp.eh_proj.weight.chunk(2, 1)
        model.mtp.e_proj.weight.copy_(embedded)
        model.mtp.h_proj.weight.copy_(hidden)
        model.mtp.enorm.weight.copy_(mtp.enorm.weight)
        model.mtp.hnorm.weight.copy_(mtp.hnorm.weight * old.norm.weight / old.norm.weight.square().mean().sqrt())
        model.mtp.norm.weight.copy_(mtp.shared_head.norm.weight)
    return model


def _init_streams(weights: Any) -> None:
    """The mean of the streams goes in and is kept; streams get different shares, so that they part."""
    nn.init.normal_(weights.fn, std=0.003)
    num = weights.config.hc_mult
    mean = -torch.tensor(float(num - 1)).log()  # its sigmoid is 1 / num
    if isinstance(weights, StreamHead):
        weights.base.fill_(mean)
    if isinstance(weights, HyperConnection):
        pre, post, comb = weights.base.split([num, num, num * num])
        pre.fill_(mean)
        post.copy_(torch.linspace(0.6, -0.6, num))
        comb.copy_(2 * torch.eye(num).flatten())


def _copy_layer(layer: Any, theirs: Any, seen: dict[nn.Module, Tensor], token_T: Tensor) -> None:
    with torch.no_grad():
        layer.attn_norm.weight.copy_(theirs.input_layernorm.weight)
        layer.ffn_norm.weight.copy_(theirs.post_attention_layernorm.weight)
    _copy_attention(layer.attn, theirs.self_attn, seen[theirs.self_attn])
    if isinstance(theirs.mlp, GroupedMoE):
        with torch.no_grad():
            layer.ffn.w13.copy_(theirs.mlp.experts.gate_up_proj)
            layer.ffn.w2.copy_(theirs.mlp.experts.down_proj)
            shared = theirs.mlp.shared_experts
            for name, source in (("w1", shared.gate_proj), ("w3", shared.up_proj), ("w2", shared.down_proj)):
                getattr(layer.ffn.shared_experts, name).weight.copy_(source.weight)
        _fit_gate(layer.ffn.gate, theirs.mlp.gate, seen[theirs.mlp])
    else:
        _split_dense(layer, theirs.mlp, seen[theirs.mlp])


# -- attention --


def _copy_attention(attn: Any, theirs: LatentAttention, x_TH: Tensor) -> None:
    """Keys [latent | room | rope]: queries put into the room what their norm has to be filled up with."""
    c, old = attn.config, theirs.config
    heads, nope, rope, rank = old.num_attention_heads, old.qk_nope_head_dim, old.qk_rope_head_dim, old.kv_lora_rank
    room = c.head_dim - rank - rope
    with torch.no_grad():
        up = theirs.kv_b_proj.weight.view(heads, nope + old.v_head_dim, rank)
        q_b = theirs.q_b_proj.weight.view(heads, nope + rope, -1)
        latent_q = up[:, :nope].transpose(1, 2) @ q_b[:, :nope]
        q_TA = theirs.q_a_layernorm(theirs.q_a_proj(x_TH))
        fill, length = _fill_norm(torch.cat((latent_q, q_b[:, nope:]), 1), q_TA, room)
        attn.wq_a.weight.copy_(theirs.q_a_proj.weight)
        attn.q_norm.weight.copy_(theirs.q_a_layernorm.weight)
        attn.wq_b.weight.copy_(torch.cat((latent_q, fill, q_b[:, nope:]), 1).flatten(0, 1))
        scale = length * (nope + rope) ** -0.5  # of keys, since queries have lost their length
        raw_TC = theirs.kv_a_proj_with_mqa(x_TH)
        latent_rms, shrink = raw_TC[:, :rank].square().mean(1).sqrt(), 0.25
        attn.wkv.weight.normal_(std=0.002)
        attn.wkv.weight[:rank] = theirs.kv_a_proj_with_mqa.weight[:rank]
        attn.wkv.weight[rank + room :] = theirs.kv_a_proj_with_mqa.weight[rank:] * shrink
        whole_rms = (x_TH @ attn.wkv.weight.T).square().mean(1).sqrt()
        norm = attn.kv_norm.weight
        norm[:rank] = theirs.kv_a_layernorm.weight * scale * (whole_rms / latent_rms).mean()
        norm[rank : rank + room] = 0.01 * scale
        norm[rank + room :] = scale / shrink * whole_rms.mean()
        attn.wo_b.weight.copy_(theirs.o_proj.weight)
        per_group = heads // c.o_groups
        wo_a = torch.zeros(c.o_groups, per_group, old.v_head_dim, per_group, c.head_dim)
        for head in range(heads):
            group, place = divmod(head, per_group)
            wo_a[group, place, :, place, :rank] = up[head, nope:] / scale
        attn.wo_a.weight.copy_(wo_a.view(attn.wo_a.weight.shape))
        if attn.ratio:
            _init_compressor(attn.compressor, attn.wkv.weight, norm)
        if attn.ratio == 4:
            nn.init.normal_(attn.indexer.wq_b.weight, std=c.q_lora_rank**-0.5)
            nn.init.normal_(attn.indexer.weights_proj.weight, std=c.hidden_size**-0.5)
            nn.init.normal_(attn.indexer.compressor.wkv.weight, std=c.hidden_size**-0.5)
            nn.init.normal_(attn.indexer.compressor.wgate.weight, std=0.1 * c.hidden_size**-0.5)


def _fill_norm(query_NDA: Tensor, q_TA: Tensor, room: int) -> tuple[Tensor, float]:
    """(rows [N, room, A] that make queries of all heads and tokens as nearly equally long as can be, that length)"""
    lengths = torch.einsum("nda,ta->tnd", query_NDA, q_TA).square().sum(2)
    wanted = 1.5 * lengths.quantile(0.95).item()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(query_NDA), room, q_TA.shape[1], generator=generator)
    rows *= (wanted / 2 / room / q_TA.square().sum(1).mean()) ** 0.5
    rows.requires_grad_()
    optimizer = torch.optim.Adam([rows], lr=0.02 * rows.detach().std().item())
    with torch.enable_grad():
        for step in range(FIT_STEPS):
            part = torch.arange(step * 512, step * 512 + 512) % len(q_TA)
            total = lengths[part] + torch.einsum("nda,ta->tnd", rows, q_TA[part]).square().sum(2)
            loss = (total / wanted - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return rows.detach(), wanted**0.5


def _init_compressor(compressor: Any, wkv: Tensor, norm: Tensor) -> None:
    copies = len(compressor.wkv.weight) // len(wkv)
    compressor.wkv.weight.copy_(wkv.repeat(copies, 1))
    nn.init.normal_(compressor.wgate.weight, std=0.2 * wkv.shape[1] ** -0.5)
    compressor.norm.weight.copy_(0.2 * norm)


# -- experts --


def _fit_gate(gate: Any, theirs: SigmoidGate, x_TH: Tensor) -> None:
    """Weights by regression on what the older gate gives to the experts that it chooses, then the bias by balance."""
    with torch.no_grad():
        want_TE = theirs(x_TH)
        scores_TE = (x_TH @ theirs.weight.T).sigmoid()
        gate.weight.copy_(theirs.weight)
    chosen_TE = want_TE > 0
    optimizer = torch.optim.Adam([gate.weight], lr=2e-3)
    for step in range(FIT_STEPS):
        part = torch.arange(step * 1024, step * 1024 + 1024) % len(x_TH)
        got = F.softplus(x_TH[part] @ gate.weight.T).sqrt()
        error = (got - scores_TE[part]).square()
        loss = (error * (chosen_TE[part] + 0.1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        got = F.softplus(x_TH @ gate.weight.T).sqrt()
        gate.bias.copy_(theirs.e_score_correction_bias)
        wanted_E = chosen_TE.float().mean(0)
        for _ in range(FIT_STEPS):
            chosen = (got + gate.bias).topk(gate.config.num_experts_per_tok)[1]
            share_E = torch.bincount(chosen.flatten(), minlength=len(wanted_E)) / len(x_TH)
            gate.bias += 0.02 * (wanted_E - share_E)


@torch.no_grad()
def _split_dense(layer: Any, dense: Any, x_TH: Tensor) -> None:
    """The most useful units of a dense layer become the shared expert, the next ones the kinds of experts, of which
    every token gets one each; which of its kind, its id decides."""
    c, ffn = layer.attn.config, layer.ffn
    width, kinds = c.moe_intermediate_size, c.num_experts_per_tok
    inner_TI = F.silu(dense.gate_proj(x_TH)) * dense.up_proj(x_TH)
    use_I = inner_TI.square().mean(0).sqrt() * dense.down_proj.weight.norm(dim=0)
    units = use_I.argsort(descending=True)[: width * (kinds + 1)].view(kinds + 1, width)
    shared = units[0]
    ffn.shared_experts.w1.weight.copy_(dense.gate_proj.weight[shared])
    ffn.shared_experts.w3.weight.copy_(dense.up_proj.weight[shared])
    ffn.shared_experts.w2.weight.copy_(dense.down_proj.weight[:, shared])
    for expert in range(c.n_routed_experts):
        own = units[1 + expert % kinds]
        ffn.w13[expert] = torch.cat((dense.gate_proj.weight[own], dense.up_proj.weight[own]))
        ffn.w2[expert] = dense.down_proj.weight[:, own] * kinds / c.routed_scaling_factor
    nn.init.normal_(ffn.gate.weight, std=0.002)
    per_kind = c.n_routed_experts // kinds
    generator = torch.Generator().manual_seed(0)
    for kind in range(kinds):
        order = torch.randperm(c.vocab_size, generator=generator) % per_kind
        ffn.gate.tid2eid[:, kind] = order * kinds + kind
