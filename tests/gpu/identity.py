"""Steps of experts that return what they get, whose outputs are known; many of them, without waiting for the host."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eprt.ep.config import EPConfig
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.low_latency_backend import NvlinkLowLatencyBackend


def identity_step(backend: NvlinkLowLatencyBackend, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Dispatch, experts that return what they get, combine; nothing waits for the host."""
    handle, received = backend.dispatch(x, slots, weights)
    return backend.combine(received.x_RH, handle)


def expected_identity(x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    return x.float() * (weights * (slots >= 0)).sum(1, keepdim=True)


def assert_near(got: Tensor, want: Tensor, what: str) -> None:
    error = (got.float() - want).norm() / want.norm().clamp_min(1e-20)
    assert float(error) < 8e-3, f"{what}: relative error {float(error)}"


def run_epochs(group: EPGroup, backend: Any, config: EPConfig, num_steps: int, num_tokens: Sequence[int]) -> None:
    """Steps of numbers of tokens drawn from num_tokens, checked at the end, when the backend is closed."""
    generator = torch.Generator("cuda").manual_seed(group.rank)
    rng = random.Random(group.rank)
    worst = torch.zeros((), device="cuda")
    sent = torch.zeros(group.size, dtype=torch.int64, device="cuda")
    for step in range(num_steps):
        T = rng.choice(num_tokens)
        x = torch.randn(T, 1024, device="cuda", generator=generator).bfloat16()
        slots = torch.randint(-1, config.num_slots, (T, 4), device="cuda", generator=generator, dtype=torch.int32)
        if step % 7 == 0:
            slots %= 8  # all to rank 0
        weights = torch.rand(T, 4, device="cuda", generator=generator)
        got, want = identity_step(backend, x, slots, weights), expected_identity(x, slots, weights)
        if T:
            worst = torch.maximum(worst, ((got.float() - want).abs() / (want.abs() + 1e-1)).max())
        rank_of = torch.where(slots >= 0, slots // 8, group.size).long()
        sent += torch.zeros(T, group.size + 1, device="cuda").scatter(1, rank_of, 1)[:, :-1].sum(0).long()
    assert float(worst) < 0.05, f"an output is off by {float(worst)}"
    stats = backend.stats()
    assert stats.num_calls == num_steps
    assert stats.sent_tokens_N.tolist() == sent.tolist()
    everyone = group.allgather(stats.sent_tokens_N.tolist())
    assert stats.recv_tokens_N.tolist() == [row[group.rank] for row in everyone]
    backend.close()
