"""What every rank does in test_ep_cpu.py: the cpu backend against the oracle, many random cases per launch."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eprt.ep import reference
from eprt.ep.config import EPConfig
from eprt.ep.cpu.backend import CpuBackend
from eprt.ep.group.group import EPGroup
from eprt.ep.reference import SentTokens
from eprt.ep.registry import make_backend

SKEWS = ("uniform", "masked", "all_masked", "one_rank", "one_slot", "repeated_slot", "empty_ranks", "no_tokens")


def make_tokens(rng: random.Random, config: EPConfig, num_ranks: int, skew: str) -> list[SentTokens]:
    """The same tokens of all ranks on all ranks, from the seed."""
    slots_per_rank = config.num_slots // num_ranks
    target = rng.randrange(num_ranks)
    everyone = []
    for rank in range(num_ranks):
        T = rng.choice([0, 1, config.num_max_tokens_per_rank, rng.randint(0, config.num_max_tokens_per_rank)])
        if skew == "no_tokens" or (skew == "empty_ranks" and (rank + target) % 2):
            T = 0
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        x_TH = torch.randn(T, config.hidden_size, generator=generator) * 10 ** rng.uniform(-3, 3)
        slots = torch.rand(T, config.num_slots, generator=generator).argsort(1)[:, : config.top_k]
        if config.top_k > config.num_slots or skew == "repeated_slot":
            slots = torch.randint(config.num_slots, (T, config.top_k), generator=generator)
        if skew == "one_rank":
            slots = target * slots_per_rank + slots % slots_per_rank
        elif skew == "one_slot":
            slots = torch.full_like(slots, target * slots_per_rank)
        elif skew == "masked":
            slots[torch.rand(slots.shape, generator=generator) < 0.4] = -1
        elif skew == "all_masked" and rank != target:
            slots[:] = -1
        weights_TK = torch.rand(T, config.top_k, generator=generator)
        dtype = rng.choice([torch.int32, torch.int64])
        everyone.append(SentTokens(x_TH.to(config.dtype), slots.to(dtype), weights_TK, rng.randint(1, 4)))
    return everyone


def expert_output(config: EPConfig, rank: int, got: Any) -> torch.Tensor:
    """Something that differs by rank, slot and value. Any deterministic function of a row and its slot will do."""
    x_RH = got.x_RH.float() if got.scale_RG is None else reference.dequantize(got.x_RH, got.scale_RG)
    slot_R = torch.repeat_interleave(torch.arange(len(got.recv_count_E)), got.recv_count_E.long())
    return (x_RH * (1.5 + 0.25 * slot_R[:, None]) + rank * 0.1).to(config.dtype)


def valid(config: EPConfig, got: Any) -> Any:
    """Without the rows a low-latency dispatch left unfilled."""
    R = int(got.recv_count_E.sum())
    assert config.mode == "low_latency" or got.x_RH.shape[0] == R
    return dataclasses.replace(got, x_RH=got.x_RH[:R], scale_RG=None if got.scale_RG is None else got.scale_RG[:R])


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape, f"{what}: {got.shape} vs {expected.shape}"
    same = got.contiguous().view(torch.uint8) == expected.contiguous().view(torch.uint8)
    if not same.all():
        at = (~same).nonzero()[0].tolist()
        raise AssertionError(f"{what}: {int((~same).sum())} bytes differ, first at {at}:\n{got}\n{expected}")


class Exchange:
    """One dispatch and combine of known tokens through a backend, checked verb by verb."""

    def __init__(self, backend: CpuBackend, tokens: list[SentTokens]):
        self.backend, self.tokens = backend, tokens
        self.config, self.rank = backend.config, backend.group.rank
        mine = tokens[self.rank]
        self.handle = backend.dispatch_send(mine.x_TH, mine.slot_idx_TK, mine.topk_weights_TK, mine.num_rounds)

    def receive(self) -> None:
        self.received = self.backend.dispatch_recv(self.handle)
        got = valid(self.config, self.received)
        expected = reference.received(self.rank, self.config, self.tokens)
        assert torch.equal(got.recv_count_E, expected.recv_count_E), f"{got.recv_count_E} vs {expected.recv_count_E}"
        assert got.num_rounds == expected.num_rounds
        assert_same_bits(got.x_RH, expected.x_RH, "x_RH")
        if expected.scale_RG is not None:
            assert_same_bits(got.scale_RG, expected.scale_RG, "scale_RG")
        self.y_RH = expert_output(self.config, self.rank, got)

    def send(self, zero_copy: bool) -> None:
        y_RH = self.y_RH
        if zero_copy:
            y_RH = self.backend.combine_buffer(self.handle, self.received)
            y_RH[: self.y_RH.shape[0]] = self.y_RH
        self.backend.combine_send(y_RH, self.handle)

    def finish(self) -> None:
        got_TH = self.backend.combine_recv(self.handle)
        outputs = [
            expert_output(self.config, rank, reference.received(rank, self.config, self.tokens))
            for rank in range(len(self.tokens))
        ]
        node_of_rank = self.backend.group.node_of_rank
        expected_TH = reference.combined(self.rank, self.config, node_of_rank, self.tokens, outputs)
        assert_same_bits(got_TH, expected_TH, "y_TH")


def round_trip(backend: CpuBackend, tokens: list[SentTokens], zero_copy: bool) -> None:
    exchange = Exchange(backend, tokens)
    exchange.receive()
    exchange.send(zero_copy)
    exchange.finish()


def two_in_flight(backend: CpuBackend, first: list[SentTokens], second: list[SentTokens], zero_copy: bool) -> None:
    a = Exchange(backend, first)
    b = Exchange(backend, second)
    a.receive()
    a.send(zero_copy)
    b.receive()
    b.send(not zero_copy)
    a.finish()
    b.finish()


def random_config(rng: random.Random, num_ranks: int, **fixed: Any) -> EPConfig:
    dtype = rng.choice([torch.float32, torch.bfloat16])
    return EPConfig(
        **{
            "hidden_size": rng.choice([1, 16, 48, 100, 128, 176, 256, 300]),
            "num_slots": num_ranks * rng.randint(1, 5),
            "top_k": rng.randint(1, 8),
            "num_max_tokens_per_rank": rng.choice([1, 3, 8]),
            "dtype": dtype,
            "payload": rng.choice(["same", "fp8"]),
            "mode": rng.choice(["normal", "low_latency"]),
            "num_buffers": rng.choice([2, 2, 3]),
            **fixed,
        }
    )


def random_cases(group: EPGroup, seed: int, num_configs: int) -> None:
    """Random shapes, types and skews, one or two handles in flight, all bits equal to the oracle's."""
    rng = random.Random(seed)
    for number in range(num_configs):
        config = random_config(rng, group.size, top_k=1 + number % 8)
        backend = make_backend("cpu", config, group)
        for skew in rng.sample(SKEWS, 3):
            try:
                first, second = (make_tokens(rng, config, group.size, skew) for _ in range(2))
                zero_copy = rng.random() < 0.5
                if rng.random() < 0.5:
                    two_in_flight(backend, first, second, zero_copy)
                else:
                    round_trip(backend, first, zero_copy)
            except BaseException as error:
                error.add_note(f"in case {number} of seed {seed}: {skew}, {config}")
                raise
        backend.close()


# -- many epochs, against what torch computes in a few calls --


def scaled(x: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """An expert that depends on its slot only: x * (1 + slot / 4), in x's dtype."""
    return (x.float() * (1 + slot.unsqueeze(-1) / 4)).to(x.dtype)


def forward(backend: Any, sent: SentTokens, then: Callable[[], None] = lambda: None) -> torch.Tensor:
    """The whole way with the experts of scaled(). then: called once the tokens are sent."""
    handle = backend.dispatch_send(sent.x_TH, sent.slot_idx_TK, sent.topk_weights_TK, sent.num_rounds)
    then()
    got = valid(backend.config, backend.dispatch_recv(handle))
    first_slot = backend.group.rank * len(got.recv_count_E)
    slot_R = torch.repeat_interleave(torch.arange(len(got.recv_count_E)) + first_slot, got.recv_count_E.long())
    backend.combine_send(scaled(got.x_RH, slot_R), handle)
    return backend.combine_recv(handle)


def forward_expected(sent: SentTokens) -> torch.Tensor:
    """The same without communication: sums in order of k."""
    y_TH = torch.zeros(sent.x_TH.shape)
    for slot_T, weight_T in zip(sent.slot_idx_TK.T, sent.topk_weights_TK.T):
        share_TH = weight_T[:, None] * scaled(sent.x_TH, slot_T).float()
        y_TH = torch.where(slot_T[:, None] >= 0, y_TH + share_TH, y_TH)
    return y_TH.to(sent.x_TH.dtype)


def many_epochs(group: EPGroup, num_epochs: int) -> None:
    """Changing shapes, values and skews for hundreds of epochs: nothing stale is ever read.

    Inside a node every bit agrees with one process that has all experts; between nodes sums are rounded on the way.
    """
    rng = random.Random(1)
    config = EPConfig(64, group.size * 3, top_k=4, num_max_tokens_per_rank=6, num_buffers=2, mode="low_latency")
    backend = make_backend("cpu", config, group)
    for epoch in range(num_epochs):
        mine = make_tokens(rng, config, group.size, rng.choice(SKEWS))[group.rank]
        got_TH, expected_TH = forward(backend, mine), forward_expected(mine)
        if group.num_nodes == 1:
            assert_same_bits(got_TH, expected_TH, f"epoch {epoch}")
        else:
            scale = max([1e-6, *expected_TH.abs().flatten().tolist()])
            torch.testing.assert_close(got_TH, expected_TH, rtol=0.02, atol=0.02 * scale)
    backend.close()


def same_bits_whoever_computes(group: EPGroup) -> None:
    """A token's result does not depend on the number of ranks, nor on what else is in the batch."""
    config = EPConfig(200, group.size * 4, top_k=6, num_max_tokens_per_rank=8, dtype=torch.bfloat16)
    together, alone = make_backend("cpu", config, group), make_backend("cpu", config, EPGroup.single())
    rng = random.Random(2)
    for skew in SKEWS:
        mine = make_tokens(rng, config, group.size, skew)[group.rank]
        got_TH = forward(together, mine)
        assert_same_bits(got_TH, forward(alone, mine), f"{skew}: {group.size} ranks against one")
        for t in range(mine.x_TH.shape[0]):
            one = SentTokens(mine.x_TH[t : t + 1], mine.slot_idx_TK[t : t + 1], mine.topk_weights_TK[t : t + 1])
            assert_same_bits(got_TH[t : t + 1], forward(alone, one), f"{skew}: token {t} in a batch against alone")
    together.close()
    alone.close()


def more_tokens_than_the_maximum(group: EPGroup) -> None:
    """Rounds: ranks with different numbers of tokens learn from num_rounds how long to go on."""
    config = EPConfig(32, group.size * 2, top_k=2, num_max_tokens_per_rank=4, dtype=torch.float32)
    backend = make_backend("cpu", config, group)
    T = 5 * group.rank  # 0, 5, 10, ...: the last rank needs most rounds
    generator = torch.Generator().manual_seed(group.rank)
    x_TH = torch.randn(T, 32, generator=generator)
    slot_TK = torch.randint(config.num_slots, (T, 2), generator=generator)
    weights_TK = torch.rand(T, 2, generator=generator)
    if T > 4:
        with pytest.raises(ValueError, match=rf"\[rank {group.rank}/.* {T} tokens, but num_max_tokens_per_rank=4"):
            backend.dispatch_send(x_TH, slot_TK, weights_TK)
    parts, left, done = [], max(1, -(-T // 4)), 0
    while left > 0:
        rows = slice(4 * done, 4 * done + 4)
        own = max(1, -(-(T - 4 * done) // 4))
        handle = backend.dispatch_send(x_TH[rows], slot_TK[rows], weights_TK[rows], own)
        got = backend.dispatch_recv(handle)
        backend.combine_send(got.x_RH.clone(), handle)
        parts.append(backend.combine_recv(handle))
        left, done = got.num_rounds - 1, done + 1
    assert done == max(1, -(-5 * (group.size - 1) // 4)), f"rank {group.rank} made {done} rounds"
    torch.testing.assert_close(torch.cat(parts), weights_TK.sum(1, keepdim=True) * x_TH)
    backend.close()
