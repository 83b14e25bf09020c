"""Hyper-connections against the formulas, written out with matrices; a row does not depend on others."""

from types import SimpleNamespace
from typing import Any

import torch

from eprt.layers.hyper_connections import HyperConnection, StreamHead, StreamWeights

M, H, EPS = 4, 24, 1e-6


def config() -> Any:
    v4 = SimpleNamespace(hc_mult=M, hc_sinkhorn_iters=20, hc_eps=EPS)
    return SimpleNamespace(v4=v4, rms_norm_eps=1e-6)


def weights(outputs: int, num_scales: int) -> StreamWeights:
    generator = torch.Generator().manual_seed(outputs)
    fn = torch.randn(outputs, M * H, generator=generator) / (M * H) ** 0.5
    scale = torch.rand(num_scales, generator=generator) + 0.5
    return StreamWeights(fn, torch.randn(outputs, generator=generator), scale)


def streams(num: int) -> torch.Tensor:
    return torch.randn(num, M, H, generator=torch.Generator().manual_seed(7))


def test_collapse_and_expand_follow_the_formulas():
    w, x, out = weights(24, 3), streams(5), torch.randn(5, H)
    row, mix = HyperConnection(config(), w)(x)
    got = mix.expand(out)
    for t in range(5):
        flat = x[t].flatten().double()
        mixes = w.fn_KW.double() @ (flat / (flat.square().mean() + 1e-6).sqrt())
        pre = (mixes[:4] * w.scale[0] + w.base_K[:4]).sigmoid() + EPS
        post = 2 * (mixes[4:8] * w.scale[1] + w.base_K[4:8]).sigmoid()
        comb = (mixes[8:] * w.scale[2] + w.base_K[8:]).view(4, 4).softmax(1) + EPS
        comb = comb / (comb.sum(0) + EPS)
        for _ in range(19):
            comb = comb / (comb.sum(1, keepdim=True) + EPS)
            comb = comb / (comb.sum(0, keepdim=True) + EPS)
        torch.testing.assert_close(row[t], (pre @ x[t].double()).float())
        want = post[:, None] * out[t] + comb.T @ x[t].double()
        torch.testing.assert_close(got[t], want.float())
        assert (comb.sum(0) - 1).abs().max() < 1e-4 and (comb.sum(1) - 1).abs().max() < 1e-2


def test_a_row_is_the_same_in_any_batch():
    x, connection, head = streams(37), HyperConnection(config(), weights(24, 3)), StreamHead(config(), weights(4, 1))
    row, mix = connection(x)
    for part in (slice(0, 1), slice(5, 8), slice(36, 37)):
        alone, alone_mix = connection(x[part])
        pairs = (alone, row[part]), (alone_mix.mixed_TMH, mix.mixed_TMH[part]), (head(x[part]), head(x)[part])
        for got, want in (*pairs, (alone_mix.post_TM, mix.post_TM[part])):
            assert torch.equal(got, want)


def test_no_tokens_are_a_batch():
    row, mix = HyperConnection(config(), weights(24, 3))(streams(0))
    assert row.shape == (0, H) and mix.expand(row).shape == (0, M, H)
