"""Sizes of the V4 demo model, and its attention: a window of tokens and compressed entries, all of which it reads.

Shapes as in model.py: B rows, L positions, H hidden, N heads, D values of a key, X compressed entries of a row.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WINDOW = 128


@dataclass(frozen=True)
class DemoV4Config:
    """Sizes, under their names in config.json."""

    vocab_size: int = 640
    hidden_size: int = 256
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    head_dim: int = 128
    qk_rope_head_dim: int = 32
    q_lora_rank: int = 96
    o_groups: int = 2
    o_lora_rank: int = 64
    n_routed_experts: int = 32
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = 2.5
    swiglu_limit: float = 10.0
    num_hash_layers: int = 1
    compress_ratios: tuple[int, ...] = (0, 4, 128, 4, 0)  # the last one is the MTP layer's
    index_n_heads: int = 4
    index_head_dim: int = 64
    index_topk: int = 64
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 10000.0
    yarn_factor: float = 4.0
    yarn_original_positions: int = 2048
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], fp32"""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def rotate_last(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved pairs of the last values turned by angles whose cosines broadcast to x[..., : 2R] / 2."""
    rest, last = x[..., : -2 * cos.shape[-1]], x[..., -2 * cos.shape[-1] :]
    even, odd = last.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((rest, turned.to(rest.dtype)), -1)


class Compressor(nn.Module):
    """One entry from several tokens, by a softmax over them in each channel. Of ratio 4 windows overlap."""

    def __init__(self, hidden_size: int, size: int, ratio: int, eps: float):
        super().__init__()
        self.ratio, self.size, channels = ratio, size, size * (1 + (ratio == 4))
        self.wkv = nn.Linear(hidden_size, channels, bias=False)
        self.wgate = nn.Linear(hidden_size, channels, bias=False)
        self.ape = nn.Parameter(torch.zeros(ratio, channels))
        self.norm = RMSNorm(size, eps)

    def forward(self, h_BLH: Tensor, cos_LR: Tensor, sin_LR: Tensor) -> Tensor:
        """[B, L, H] -> [B, X, size]"""
        values = self.wkv(h_BLH).float().unflatten(1, (-1, self.ratio))
        gates = self.wgate(h_BLH).float().unflatten(1, (-1, self.ratio)) + self.ape
        if self.ratio == 4:
            values = torch.cat((_previous(values, self.size, 0.0), values[..., self.size :]), 2)
            gates = torch.cat((_previous(gates, self.size, -torch.inf), gates[..., self.size :]), 2)
        pooled = (values * gates.softmax(2)).sum(2)
        return rotate_last(self.norm(pooled), cos_LR[:: self.ratio], sin_LR[:: self.ratio])


def _previous(windows_BXRC: Tensor, size: int, none: float) -> Tensor:
    """The first channels of each window's predecessor."""
    return F.pad(windows_BXRC[:, :-1, :, :size], (0, 0, 0, 0, 1, 0), value=none)


class Indexer(nn.Module):
    """Scores of entries; learns from the attention's own weights."""

    def __init__(self, c: DemoV4Config):
        super().__init__()
        self.num_heads, self.scale = c.index_n_heads, (c.index_head_dim * c.index_n_heads) ** -0.5
        self.wq_b = nn.Linear(c.q_lora_rank, c.index_n_heads * c.index_head_dim, bias=False)
        self.weights_proj = nn.Linear(c.hidden_size, c.index_n_heads, bias=False)
        self.compressor = Compressor(c.hidden_size, c.index_head_dim, 4, c.rms_norm_eps)

    def forward(self, q_BLA: Tensor, h_BLH: Tensor, cos_LR: Tensor, sin_LR: Tensor) -> Tensor:
        """[B, L, X]"""
        keys = self.compressor(h_BLH, cos_LR, sin_LR)
        query = self.wq_b(q_BLA).unflatten(-1, (self.num_heads, -1))
        query = rotate_last(query, cos_LR[:, None], sin_LR[:, None])
        products = (query.flatten(1, 2) @ keys.transpose(1, 2).to(query.dtype)).relu()
        weights = self.weights_proj(h_BLH).float() * self.scale
        return (products.view(*query.shape[:3], -1).float() * weights.unsqueeze(-1)).sum(2)


class Attention(nn.Module):
    """One vector is key and value at once, for all heads; a window of tokens, and behind it compressed entries."""

    def __init__(self, c: DemoV4Config, ratio: int):
        super().__init__()
        self.config, self.ratio = c, ratio
        self.wq_a = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.wq_b = nn.Linear(c.q_lora_rank, c.num_attention_heads * c.head_dim, bias=False)
        self.wkv = nn.Linear(c.hidden_size, c.head_dim, bias=False)
        self.kv_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        group_size = c.num_attention_heads * c.head_dim // c.o_groups
        self.wo_a = nn.Linear(group_size, c.o_groups * c.o_lora_rank, bias=False)
        self.wo_b = nn.Linear(c.o_groups * c.o_lora_rank, c.hidden_size, bias=False)
        self.attn_sink = nn.Parameter(torch.full((c.num_attention_heads,), -4.0))
        if ratio:
            self.compressor = Compressor(c.hidden_size, c.head_dim, ratio, c.rms_norm_eps)
        if ratio == 4:
            self.indexer = Indexer(c)
        self.index_loss: Tensor | None = None  # of the last forward pass

    def forward(self, h_BLH: Tensor, cos_LR: Tensor, sin_LR: Tensor) -> Tensor:
        """[B, L, H] -> [B, L, H]"""
        c, length = self.config, h_BLH.shape[1]
        q_BLA = self.q_norm(self.wq_a(h_BLH))
        heads = self.wq_b(q_BLA).unflatten(-1, (c.num_attention_heads, c.head_dim)).float()
        query = rotate_last(F.rms_norm(heads, (c.head_dim,), None, c.rms_norm_eps), cos_LR[:, None], sin_LR[:, None])
        key_BLD = rotate_last(self.kv_norm(self.wkv(h_BLH)), cos_LR, sin_LR)
        entries = key_BLD[:, :0]
        if self.ratio and length >= self.ratio:
            entries = self.compressor(h_BLH, cos_LR, sin_LR)
        query = query * c.head_dim**-0.5
        out, weights = self._attend(query.to(h_BLH.dtype), key_BLD.to(h_BLH.dtype), entries.to(h_BLH.dtype))
        if self.ratio == 4 and self.training:
            scores = self.indexer(q_BLA.detach(), h_BLH.detach(), cos_LR, sin_LR)
            self.index_loss = _index_loss(scores, weights.detach(), self._unseen(length, scores.device))
        out = rotate_last(out.float(), cos_LR[:, None], -sin_LR[:, None]).to(h_BLH.dtype)
        groups = out.flatten(2).unflatten(-1, (c.o_groups, -1))
        low_rank = torch.einsum("blgi,goi->blgo", groups, self.wo_a.weight.to(groups).unflatten(0, (c.o_groups, -1)))
        return self.wo_b(low_rank.flatten(2))

    def _attend(self, query_BLND: Tensor, key_BLD: Tensor, entry_BXD: Tensor) -> tuple[Tensor, Tensor]:
        """(output [B, L, N, D], weight of each entry summed over heads [B, L, X])"""
        (rows, length, heads, size), span = query_BLND.shape, WINDOW
        blocks = length // span
        query = query_BLND.reshape(rows, blocks, span * heads, size)
        earlier = F.pad(key_BLD, (0, 0, span, 0))[:, :length].view(rows, blocks, span, size)
        near = torch.cat((earlier, key_BLD.view(rows, blocks, span, size)), 2)
        scores = (query @ near.transpose(2, 3)).view(rows, blocks, span, heads, -1)
        scores = scores.masked_fill(self._outside(blocks, scores.device), -torch.inf)
        far = (query.flatten(1, 2) @ entry_BXD.transpose(1, 2)).view(rows, blocks, span, heads, -1)
        unseen = self._unseen(length, scores.device)[:, : far.shape[-1]].view(1, blocks, span, 1, -1)
        sink = self.attn_sink.to(scores.dtype).view(heads, 1).expand(rows, blocks, span, heads, 1)
        weights = torch.cat((scores, far.masked_fill(unseen, -torch.inf), sink), -1).softmax(-1)
        near_weights, far_weights, _ = weights.split([2 * span, far.shape[-1], 1], -1)
        out = near_weights.flatten(2, 3) @ near
        out = out.view(rows, length * heads, size) + far_weights.reshape(rows, length * heads, -1) @ entry_BXD
        return out.view(rows, length, heads, size), far_weights.float().sum(3).flatten(1, 2)

    def _outside(self, blocks: int, device: torch.device) -> Tensor:
        """[1, blocks, 128, 1, 256]: keys of the block before and this one that a query does not see."""
        i = torch.arange(WINDOW, device=device)[:, None]
        j = torch.arange(2 * WINDOW, device=device)
        outside = ((j <= i) | (j > i + WINDOW)).expand(blocks, -1, -1).clone()
        outside[0, :, :WINDOW] = True
        return outside[None, :, :, None]

    def _unseen(self, length: int, device: torch.device) -> Tensor:
        """[L, X]: entries that are not complete yet at a position."""
        if not self.ratio:
            return torch.ones(length, 0, dtype=torch.bool, device=device)
        seen = (torch.arange(length, device=device) + 1) // self.ratio
        return torch.arange(length // self.ratio, device=device) >= seen[:, None]


def _index_loss(scores_BLX: Tensor, weights_BLX: Tensor, unseen_LX: Tensor) -> Tensor:
    """Cross-entropy of the scores' softmax against the share of attention that each entry gets."""
    log_share = scores_BLX.masked_fill(unseen_LX, -1e4).log_softmax(-1)
    total = weights_BLX.sum(-1, keepdim=True)
    return -(weights_BLX / (total + 1e-6) * log_share).sum(-1).mean()
