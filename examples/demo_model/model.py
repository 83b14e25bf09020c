"""The DeepSeek-V3 architecture in plain PyTorch, for training the demo model.

Shapes: B rows, L positions, T = B * L tokens, H hidden, N heads, E experts, K chosen experts, I expert width.
All experts compute all tokens, weighted 0 where they were not chosen: wasteful, but one matrix product per projection,
which at this size beats sorting tokens by expert. There is no cache and no fast path; `eprt` is for that.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DemoConfig:
    """Sizes, under their names in config.json."""

    vocab_size: int = 640
    hidden_size: int = 256
    intermediate_size: int = 384
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    n_shared_experts: int = 1
    n_routed_experts: int = 32
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 1
    kv_lora_rank: int = 64
    q_lora_rank: int = 96
    qk_rope_head_dim: int = 32
    qk_nope_head_dim: int = 32
    v_head_dim: int = 32
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        x_fp32 = x.float()
        x_fp32 = x_fp32 * torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x_fp32.to(x.dtype)


def rotate(x: Tensor, cos_LR: Tensor, sin_LR: Tensor) -> Tensor:
    """Rotary embedding over interleaved pairs: x [B, heads, L, 2R] -> same shape, even halves first."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos_LR - odd * sin_LR, odd * cos_LR + even * sin_LR], -1)


class Attention(nn.Module):
    """Multi-head latent attention, unabsorbed."""

    def __init__(self, config: DemoConfig):
        super().__init__()
        self.config = c = config
        head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = nn.Linear(c.q_lora_rank, c.num_attention_heads * head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = nn.Linear(
            c.kv_lora_rank, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(c.num_attention_heads * c.v_head_dim, c.hidden_size, bias=False)

    def forward(self, x_BLH: Tensor, cos_LR: Tensor, sin_LR: Tensor) -> Tensor:
        """Causal attention over each row. [B, L, H] -> [B, L, H]"""
        c, (num_rows, length, _) = self.config, x_BLH.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BLH)))
        q_nope, q_rope = _heads(q, c.num_attention_heads).split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x_BLH).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = _heads(self.kv_b_proj(self.kv_a_layernorm(latent)), c.num_attention_heads)
        k_nope, value = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        q_rope, k_rope = rotate(q_rope, cos_LR, sin_LR), rotate(_heads(k_rope, 1), cos_LR, sin_LR)
        query = torch.cat([q_nope, q_rope.to(q_nope.dtype)], -1)
        key = torch.cat([k_nope, k_rope.to(k_nope.dtype).expand(-1, c.num_attention_heads, -1, -1)], -1)
        # The fast attention kernels want values as wide as keys.
        padded_value = F.pad(value, (0, key.shape[-1] - c.v_head_dim))
        out = F.scaled_dot_product_attention(query, key, padded_value, is_causal=True)[..., : c.v_head_dim]
        return self.o_proj(out.transpose(1, 2).reshape(num_rows, length, -1))


def _heads(x_BLC: Tensor, num_heads: int) -> Tensor:
    """[B, L, heads * C] -> [B, heads, L, C]"""
    return x_BLC.unflatten(-1, (num_heads, -1)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU: the dense layer and the shared expert."""

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """Sigmoid gate, limited to the best groups; the correction bias affects the choice and never the weights."""

    def __init__(self, config: DemoConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.register_buffer("num_tokens_E", torch.zeros(config.n_routed_experts), persistent=False)

    def forward(self, x_TH: Tensor) -> Tensor:
        """Weight of every expert for every token, 0 where not chosen: [T, H] -> [T, E] fp32."""
        c = self.config
        with torch.autocast(x_TH.device.type, enabled=False):
            scores_TE = (x_TH.float() @ self.weight.float().T).sigmoid()
        with torch.no_grad():
            choice_TE = scores_TE + self.e_score_correction_bias
            grouped = choice_TE.unflatten(-1, (c.n_group, -1))
            group_idx = grouped.topk(2, -1)[0].sum(-1).topk(c.topk_group, -1)[1]
            kept = torch.zeros_like(grouped[..., 0]).scatter(1, group_idx, 1.0).bool()
            choice_TE = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
            chosen_TE = torch.zeros_like(scores_TE).scatter(1, choice_TE.topk(c.num_experts_per_tok, -1)[1], 1.0)
            self.num_tokens_E.add_(chosen_TE.sum(0))
        weights_TE = scores_TE * chosen_TE
        return weights_TE / (weights_TE.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move the choice towards experts that got fewer tokens than the mean since the last call."""
        self.e_score_correction_bias += rate * torch.sign(self.num_tokens_E.mean() - self.num_tokens_E)
        self.num_tokens_E.zero_()


class MoE(nn.Module):
    """Routed experts and the shared expert; routed weights are stored for all experts together."""

    def __init__(self, config: DemoConfig):
        super().__init__()
        c = config
        self.gate = Gate(c)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(
            torch.empty(c.n_routed_experts, 2 * c.moe_intermediate_size, c.hidden_size)
        )
        self.experts.down_proj = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size))
        self.shared_experts = MLP(c.hidden_size, c.n_shared_experts * c.moe_intermediate_size)

    def forward(self, x_BLH: Tensor) -> Tensor:
        """[B, L, H] -> [B, L, H]"""
        x_TH = x_BLH.flatten(0, 1)
        weights_TE = self.gate(x_TH)
        num_experts, _, hidden = self.experts.gate_up_proj.shape
        both = F.linear(x_TH, self.experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (num_experts, 2, -1))
        inner_TEI = F.silu(both[:, :, 0]) * both[:, :, 1] * weights_TE.unsqueeze(-1).to(both.dtype)
        down = self.experts.down_proj.transpose(0, 1).reshape(hidden, -1)
        return F.linear(inner_TEI.flatten(1), down).view_as(x_BLH) + self.shared_experts(x_BLH)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: DemoConfig, layer_idx: int):
        super().__init__()
        c = config
        self.self_attn = Attention(c)
        self.mlp = MoE(c) if layer_idx >= c.first_k_dense_replace else MLP(c.hidden_size, c.intermediate_size)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x_BLH: Tensor, cos_LR: Tensor, sin_LR: Tensor) -> Tensor:
        """[B, L, H] -> [B, L, H]"""
        x_BLH = x_BLH + self.self_attn(self.input_layernorm(x_BLH), cos_LR, sin_LR)
        return x_BLH + self.mlp(self.post_attention_layernorm(x_BLH))


class MtpLayer(DecoderLayer):
    """Multi-token prediction: from a position's last hidden state and the next token to the token after it."""

    def __init__(self, config: DemoConfig):
        super().__init__(config, config.num_hidden_layers)
        c = config
        self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.shared_head = nn.Module()
        self.shared_head.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class DemoModel(nn.Module):
    """Decoder with one MTP layer, which is the last of `model.layers` and shares embedding and head."""

    def __init__(self, config: DemoConfig):
        super().__init__()
        self.config = c = config
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        layers = [DecoderLayer(c, layer_idx) for layer_idx in range(c.num_hidden_layers)]
        self.model.layers = nn.ModuleList([*layers, MtpLayer(c)])
        self.model.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        frequency = c.rope_theta ** -(torch.arange(0, c.qk_rope_head_dim, 2).double() / c.qk_rope_head_dim)
        angle = torch.outer(torch.arange(c.max_position_embeddings).double(), frequency)
        self.register_buffer("cos_LR", angle.cos().float(), persistent=False)
        self.register_buffer("sin_LR", angle.sin().float(), persistent=False)

    def init_weights(self) -> None:
        """Normal with fan-in scale; projections back into the stream start smaller, as there are many of them."""
        num_writers = 2 * len(self.model.layers)
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            std = 0.02 if "embed" in name or "gate.weight" in name else 0.6 * weight.shape[-1] ** -0.5
            nn.init.normal_(weight, std=std / num_writers**0.5 if "o_proj" in name or "down_proj" in name else std)

    def forward(self, token_ids_BL: Tensor) -> Tensor:
        """Final normed hidden states. [B, L] -> [B, L, H]"""
        length = token_ids_BL.shape[1]
        x_BLH = self.model.embed_tokens(token_ids_BL)
        for layer in self.model.layers[: self.config.num_hidden_layers]:
            x_BLH = layer(x_BLH, self.cos_LR[:length], self.sin_LR[:length])
        return self.model.norm(x_BLH)

    def forward_mtp(self, hidden_BLH: Tensor, next_ids_BL: Tensor) -> Tensor:
        """Hidden states that the head turns into the token after the next. [B, L, H], [B, L] -> [B, L, H]"""
        layer, length = self.model.layers[-1], next_ids_BL.shape[1]
        both = torch.cat([layer.enorm(self.model.embed_tokens(next_ids_BL)), layer.hnorm(hidden_BLH)], -1)
        return layer.shared_head.norm(layer(layer.eh_proj(both), self.cos_LR[:length], self.sin_LR[:length]))
