"""The DeepSeek-V4 architecture in plain PyTorch, for training the V4 demo model.

Shapes: B rows, L positions (a multiple of 128), T = B * L tokens, H hidden, M streams, N heads, D values of a key,
E experts, K chosen experts, X compressed entries of a row. Attention reads every entry that is visible; the indexers
are trained beside it to name those that get the most weight. There is no cache and no fast path; `eprt` is for that.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eprt.config import RopeConfig
from eprt.layers.rope import cos_sin_table

from .attention import Attention, DemoV4Config, RMSNorm


class MLP(nn.Module):
    """SwiGLU whose activations are cut: the shared expert."""

    def __init__(self, hidden_size: int, width: int, limit: float):
        super().__init__()
        self.limit = limit
        self.w1 = nn.Linear(hidden_size, width, bias=False)
        self.w3 = nn.Linear(hidden_size, width, bias=False)
        self.w2 = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return self.w2(swiglu(self.w1(x), self.w3(x), self.limit))


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class Gate(nn.Module):
    """Square roots of softplus; experts are the best ones, or given by the token in hash layers."""

    tid2eid: Tensor
    num_tokens_E: Tensor

    def __init__(self, c: DemoV4Config, by_token: bool):
        super().__init__()
        self.config = c
        self.weight = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        if by_token:
            self.register_buffer("tid2eid", torch.zeros(c.vocab_size, c.num_experts_per_tok, dtype=torch.int64))
        else:
            self.register_buffer("bias", torch.zeros(c.n_routed_experts))
        self.register_buffer("num_tokens_E", torch.zeros(c.n_routed_experts), persistent=False)
        self.by_token = by_token

    def forward(self, x_TH: Tensor, token_T: Tensor) -> tuple[Tensor, Tensor]:
        """(weights fp32, experts), [T, K]"""
        with torch.autocast(x_TH.device.type, enabled=False):
            scores_TE = F.softplus(x_TH.float() @ self.weight.float().T).sqrt()
        with torch.no_grad():
            if self.by_token:
                chosen_TK = self.tid2eid[token_T]
            else:
                chosen_TK = (scores_TE + self.bias).topk(self.config.num_experts_per_tok, -1)[1]
            self.num_tokens_E += torch.bincount(chosen_TK.flatten(), minlength=len(self.num_tokens_E))
        weights_TK = scores_TE.gather(1, chosen_TK)
        return weights_TK / weights_TK.sum(-1, keepdim=True) * self.config.routed_scaling_factor, chosen_TK

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move the choice towards experts that got fewer tokens than the mean since the last call."""
        if not self.by_token:
            self.bias += rate * torch.sign(self.num_tokens_E.mean() - self.num_tokens_E)
        self.num_tokens_E.zero_()


class MoE(nn.Module):
    """Routed experts and the shared expert. Each expert computes its own tokens. fake_quantise: what experts' weights
    are passed through before use, so that training sees what four bits make of them."""

    def __init__(self, c: DemoV4Config, by_token: bool):
        super().__init__()
        self.config = c
        self.fake_quantise: Callable[[Tensor], Tensor] | None = None
        self.gate = Gate(c, by_token)
        width = c.moe_intermediate_size
        self.w13 = nn.Parameter(torch.empty(c.n_routed_experts, 2 * width, c.hidden_size))
        self.w2 = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size, width))
        self.shared_experts = MLP(c.hidden_size, width, c.swiglu_limit)

    def forward(self, x_BLH: Tensor, token_BL: Tensor) -> Tensor:
        """[B, L, H] -> [B, L, H]"""
        x_TH = x_BLH.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TH, token_BL.flatten())
        order = chosen_TK.flatten().argsort(stable=True)
        counts = torch.bincount(chosen_TK.flatten(), minlength=self.config.n_routed_experts).tolist()
        token_of = order // chosen_TK.shape[1]
        w13, w2 = self.w13, self.w2
        if self.fake_quantise is not None:
            w13, w2 = self.fake_quantise(w13), self.fake_quantise(w2)
        parts = []
        for x, up, down in zip(x_TH[token_of].split(counts), w13.unbind(), w2.unbind()):
            gate, linear_part = F.linear(x, up).chunk(2, -1)
            parts.append(F.linear(swiglu(gate, linear_part, self.config.swiglu_limit), down))
        weighted = torch.cat(parts) * weights_TK.flatten()[order].unsqueeze(-1).to(parts[0].dtype)
        routed = torch.zeros(x_TH.shape, dtype=weighted.dtype).index_add(0, token_of, weighted)
        return routed.view_as(x_BLH) + self.shared_experts(x_BLH)


class StreamWeights(nn.Module):
    """fn, base and scale of one collapse."""

    def __init__(self, c: DemoV4Config, outputs: int, num_scales: int):
        super().__init__()
        self.config = c
        self.fn = nn.Parameter(torch.empty(outputs, c.hc_mult * c.hidden_size))
        self.base = nn.Parameter(torch.zeros(outputs))
        self.scale = nn.Parameter(torch.ones(num_scales))

    def project(self, x_BLMH: Tensor) -> Tensor:
        """fp32 [B, L, outputs] of the normalised streams."""
        flat = F.rms_norm(x_BLMH.flatten(2), (self.fn.shape[1],), None, self.config.rms_norm_eps)
        return F.linear(flat, self.fn).float()

    def collapse(self, x_BLMH: Tensor, logits_BLM: Tensor) -> Tensor:
        open_BLM = logits_BLM.sigmoid() + self.config.hc_eps
        return (open_BLM.unsqueeze(-1) * x_BLMH).sum(2)


class HyperConnection(StreamWeights):
    """Around one sublayer: its input, and how its output goes back into the streams."""

    def __init__(self, c: DemoV4Config):
        super().__init__(c, (2 + c.hc_mult) * c.hc_mult, 3)

    def forward(self, x_BLMH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(input [B, L, H], mixture of the streams [B, L, M, H], share of the output [B, L, M])"""
        num, eps = self.config.hc_mult, self.config.hc_eps
        pre, post, comb = self.project(x_BLMH).split([num, num, num * num], -1)
        base_pre, base_post, base_comb = self.base.split([num, num, num * num])
        comb = (comb * self.scale[2] + base_comb).unflatten(-1, (num, num)).permute(2, 3, 0, 1)
        comb = comb.softmax(1) + eps  # [from, to, B, L]
        comb = comb / (comb.sum(0, keepdim=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(1, keepdim=True) + eps)
            comb = comb / (comb.sum(0, keepdim=True) + eps)
        mixed = comb.permute(2, 3, 1, 0).to(x_BLMH.dtype) @ x_BLMH
        share = 2 * (post * self.scale[1] + base_post).sigmoid()
        return self.collapse(x_BLMH, pre * self.scale[0] + base_pre), mixed, share


class StreamHead(StreamWeights):
    """From the streams to one row."""

    def __init__(self, c: DemoV4Config):
        super().__init__(c, c.hc_mult, 1)

    def forward(self, x_BLMH: Tensor) -> Tensor:
        """[B, L, M, H] -> [B, L, H]"""
        return self.collapse(x_BLMH, self.project(x_BLMH) * self.scale + self.base)


class Layer(nn.Module):
    """Attention and experts, each between a collapse of the streams and their expansion."""

    def __init__(self, c: DemoV4Config, layer_idx: int):
        super().__init__()
        self.attn = Attention(c, c.compress_ratios[layer_idx])
        self.ffn = MoE(c, layer_idx < c.num_hash_layers)
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.ffn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hc_attn, self.hc_ffn = HyperConnection(c), HyperConnection(c)

    def forward(self, x_BLMH: Tensor, token_BL: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """[B, L, M, H] -> [B, L, M, H]"""
        row, mixed, share = self.hc_attn(x_BLMH)
        x_BLMH = mixed + share.unsqueeze(-1) * self.attn(self.attn_norm(row).to(row.dtype), *angles).unsqueeze(2)
        row, mixed, share = self.hc_ffn(x_BLMH)
        return mixed + share.unsqueeze(-1) * self.ffn(self.ffn_norm(row).to(row.dtype), token_BL).unsqueeze(2)


class MtpLayer(Layer):
    """Multi-token prediction: from the streams at a position and the next token to the token after it."""

    def __init__(self, c: DemoV4Config):
        super().__init__(c, c.num_hidden_layers)
        self.enorm, self.hnorm, self.norm = (RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(3))
        self.e_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.h_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.hc_head = StreamHead(c)


class DemoV4Model(nn.Module):
    """Decoder with one MTP layer, which shares embedding and head."""

    def __init__(self, config: DemoV4Config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, layer_idx) for layer_idx in range(c.num_hidden_layers))
        self.mtp = MtpLayer(c)
        self.hc_head, self.norm = StreamHead(c), RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        plain = RopeConfig(theta=c.rope_theta)
        yarn = RopeConfig(
            theta=c.compress_rope_theta,
            kind="yarn",
            factor=c.yarn_factor,
            original_max_position_embeddings=c.yarn_original_positions,
            attention_factor=1.0,
        )
        for name, rope in (("window", plain), ("compress", yarn)):
            table = cos_sin_table(rope, c.qk_rope_head_dim, c.yarn_original_positions)
            self.register_buffer(f"{name}_angles", table, persistent=False)

    def forward(self, token_BL: Tensor) -> list[Tensor]:
        """The streams before the first layer and behind each. [B, L] -> [B, L, M, H] each"""
        x_BLMH = self.embed(token_BL).unsqueeze(2).repeat(1, 1, self.config.hc_mult, 1)
        streams = [x_BLMH]
        for layer in self.layers:
            streams.append(layer(streams[-1], token_BL, self._angles(layer, token_BL.shape[1])))
        return streams

    def collapsed(self, x_BLMH: Tensor) -> Tensor:
        """What the head takes."""
        return self.norm(self.hc_head(x_BLMH))

    def forward_mtp(self, x_BLMH: Tensor, next_BL: Tensor) -> Tensor:
        """Hidden states that the head turns into the token after the next. [B, L, M, H], [B, L] -> [B, L, H]"""
        layer = self.mtp
        embedded = layer.e_proj(layer.enorm(self.embed(next_BL)))
        streams = layer.h_proj(layer.hnorm(x_BLMH)) + embedded.unsqueeze(2)
        return layer.norm(layer.hc_head(layer(streams.float(), next_BL, self._angles(layer, next_BL.shape[1]))))

    def _angles(self, layer: Any, length: int) -> tuple[Tensor, Tensor]:
        table: Any = self.compress_angles if layer.attn.ratio else self.window_angles
        cos, sin = table[:length].chunk(2, -1)
        return cos, sin
