"""What every rank does in test_ep_cpu.py: the cpu backend against the oracle, many random cases per launch."""

import dataclasses
import random
from typing import Any

import torch

from eprt.ep import reference
from eprt.ep.api import EPConfig, make_backend
from eprt.ep.cpu import CpuBackend
from eprt.ep.group import EPGroup
from eprt.ep.reference import Tokens

SKEWS = ("uniform", "masked", "all_masked", "one_rank", "one_slot", "repeated_slot", "empty_ranks", "no_tokens")


def make_tokens(rng: random.Random, config: EPConfig, num_ranks: int, skew: str) -> list[Tokens]:
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
        everyone.append(Tokens(x_TH.to(config.dtype), slots.to(dtype), weights_TK, rng.randint(1, 4)))
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

    def __init__(self, backend: CpuBackend, tokens: list[Tokens]):
        self.backend, self.tokens = backend, tokens
        self.config, self.rank = backend.config, backend.group.rank
        mine = tokens[self.rank]
        self.handle = backend.dispatch_send(mine.x_TH, mine.slot_idx_TK, mine.topk_weights_TK, mine.num_rounds)

    def receive(self) -> None:
        got = valid(self.config, self.backend.dispatch_recv(self.handle))
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
            y_RH = self.backend.combine_buffer(self.handle)
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


def round_trip(backend: CpuBackend, tokens: list[Tokens], zero_copy: bool) -> None:
    exchange = Exchange(backend, tokens)
    exchange.receive()
    exchange.send(zero_copy)
    exchange.finish()


def two_in_flight(backend: CpuBackend, first: list[Tokens], second: list[Tokens], zero_copy: bool) -> None:
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


def random_cases(group: EPGroup, seed: int, num_configs: int, num_nodes: int) -> None:
    """Random shapes, types and skews, one or two handles in flight, all bits equal to the oracle's."""
    assert group.num_nodes == num_nodes, group.node_of_rank
    rng = random.Random(seed)
    for number in range(num_configs):
        config = random_config(rng, group.size, top_k=1 + number % 8)
        backend = make_backend("cpu", config, group)
        for skew in rng.sample(SKEWS, 4):
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
