"""What every rank does in test_normal.py: the EP calls of normal mode against an oracle.

SentTokens of all ranks are made on all ranks from one seed, so each rank knows what it must receive.
"""

import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from eprt.compat.deep_ep.rows import RowExchange
from eprt.ep.config import EPConfig
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.normal_backend import NvlinkNormalBackend
from eprt.ep.nvlink.options import NvlinkOptions
from eprt.ep.reference import SentTokens
from eprt.ep.registry import make_backend
from tests.gpu import fast_oracle
from tests.gpu.identity import assert_near, expected_identity, identity_step, run_epochs
from tests.ranks.cases_ep import assert_same_bits

SKEWS = ("uniform", "masked", "one_rank", "one_slot", "repeated_slot", "empty_ranks", "no_tokens")
# (hidden, experts, top_k, most tokens per rank, payload, exact): corners; random ones follow
SHAPES = [
    (7168, 256, 8, 4096, "fp8", False),
    (7168, 256, 8, 1000, "same", False),
    (2048, 8, 1, 8192, "same", False),
    (4096, 384, 10, 513, "fp8", False),
    (5120, 160, 6, 700, "same", True),
    (8192, 64, 4, 300, "fp8", True),
    (1008, 24, 3, 333, "fp8", False),
    (16, 8, 2, 100, "same", False),
]


def random_tokens(rng: random.Random, config: EPConfig, num_ranks: int, skew: str) -> list[SentTokens]:
    """The same tokens of all ranks on all ranks, on the GPU, from the seed."""
    local, target = config.num_slots // num_ranks, rng.randrange(num_ranks)
    most, everyone = config.num_max_tokens_per_rank, []
    for rank in range(num_ranks):
        T = rng.choice([0, 1, most, rng.randint(0, most), rng.randint(0, most)])
        if skew == "no_tokens" or (skew == "empty_ranks" and (rank + target) % 2):
            T = 0
        generator = torch.Generator("cuda").manual_seed(rng.randrange(1 << 30))
        x = torch.randn(T, config.hidden_size, device="cuda", generator=generator) * 10 ** rng.uniform(-3, 3)
        slots = torch.rand(T, config.num_slots, device="cuda", generator=generator).argsort(1)[:, : config.top_k]
        if config.top_k > config.num_slots or skew == "repeated_slot":
            slots = torch.randint(config.num_slots, (T, config.top_k), device="cuda", generator=generator)
        if skew == "one_rank":
            slots = target * local + slots % local
        elif skew == "one_slot":
            slots = torch.full_like(slots, target * local)
        elif skew == "masked":
            slots = torch.where(torch.rand(slots.shape, device="cuda", generator=generator) < 0.4, -1, slots)
        weights = torch.rand(T, config.top_k, device="cuda", generator=generator)
        dtype = rng.choice([torch.int32, torch.int64])
        everyone.append(SentTokens(x.to(config.dtype), slots.to(dtype).contiguous(), weights))
    return everyone


def make_config(group: EPGroup, shape: Sequence, **fields) -> EPConfig:
    hidden, experts, top_k, tokens, payload, exact = shape
    experts = -(-experts // group.size) * group.size
    options = {"timeout_s": 20.0, **fields}
    return EPConfig(
        hidden, experts, top_k, tokens, torch.bfloat16, payload, "normal", device="cuda", exact_combine=exact, **options
    )


def make(group: EPGroup, config: EPConfig, **options) -> NvlinkNormalBackend:
    """options: of NvlinkOptions."""
    backend = make_backend("nvlink", config, group, NvlinkOptions(**options))
    assert isinstance(backend, NvlinkNormalBackend)
    return backend


def poison_new_tensors() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def poison(backend: NvlinkNormalBackend) -> None:
    """What a kernel leaves out must not look right."""
    poison_new_tensors()
    kernels = backend.kernels
    blocks_and_returned = kernels.memory.num_bytes - kernels.data_begin
    kernels.memory.view(kernels.data_begin, (blocks_and_returned,), torch.uint8).fill_(0xFF)  # NaN, rows far outside
    for flight in backend._flights:
        flight.slot_rows.fill_(-7)


def check_once(backend: NvlinkNormalBackend, everyone: Sequence[SentTokens], calls: str) -> None:
    """One dispatch and combine, compared bit for bit. calls: "single", "ahead" (receives started) or "fused"."""
    config, options, rank = backend.config, backend.options, backend.group.rank
    mine = everyone[rank]
    if calls != "fused":
        handle = backend.dispatch_send(mine.x_TH, mine.slot_idx_TK, mine.topk_weights_TK, 1 + rank)
        if calls == "ahead":
            backend.dispatch_start(handle)
        received = backend.dispatch_recv(handle)
        assert received.num_rounds == (backend.group.size if options.max_recv_rows is None else 1)
    else:
        handle, received = backend.dispatch(mine.x_TH, mine.slot_idx_TK, mine.topk_weights_TK)
    want = fast_oracle.received(rank, config, everyone, options.expert_alignment)
    assert_same_bits(received.recv_count_E, want.count, "recv_count_E")
    if options.max_recv_rows is None:
        assert received.x_RH.shape[0] == want.num_rows, (received.x_RH.shape, want.num_rows)
    # The host reads how many rows an expert takes: aligned, they are more than were received.
    knows = options.max_recv_rows is None and options.expert_alignment == 1
    known = received.recv_count_E.tolist() if knows else None
    assert (received.counts and list(received.counts)) == known, (received.counts, known)
    bits = received.x_RH.view(torch.uint8)
    assert_same_bits(bits[want.row], want.x.view(torch.uint8)[want.row], "x_RH")
    if want.scale is not None:
        assert received.scale_RG is not None
        assert_same_bits(received.scale_RG[want.row], want.scale[want.row], "scale_RG")
    y = backend.combine_buffer(handle, received)
    y.fill_(float("nan"))
    y[want.row] = fast_oracle.outputs(rank, config, want)[want.row]
    if calls == "fused":
        y_TH = backend.combine(y, handle)
    else:
        backend.combine_send(y, handle)
        if calls == "ahead":
            backend.combine_start(handle)
        y_TH = backend.combine_recv(handle)
    assert_same_bits(y_TH, fast_oracle.combined(rank, config, everyone), "y_TH")


def check_shapes(group: EPGroup, rng: random.Random, shapes: Sequence[Sequence], cases_per_shape: int) -> None:
    for number, shape in enumerate(shapes):
        config = make_config(group, shape)
        num_sms, alignment = rng.choice([1, 5, 24, None]), rng.choice([1, 1, 128, 24])
        rows = group.size * shape[3] * shape[2] + config.num_slots // group.size * (alignment - 1)
        bound = rows if rng.random() < 0.3 else None
        started = time.monotonic()
        backend = make(group, config, num_sms=num_sms, expert_alignment=alignment, max_recv_rows=bound)
        for case in range(cases_per_shape):
            everyone = random_tokens(rng, config, group.size, SKEWS[(case + 3 * number) % len(SKEWS)])
            poison(backend)
            calls = "fused" if bound else rng.choice(["single", "ahead", "fused"])
            try:
                check_once(backend, everyone, calls)
            except BaseException:
                tokens = [t.x_TH.shape[0] for t in everyone]
                print(shape, config, case, calls, tokens, SKEWS[(case + 3 * number) % len(SKEWS)], flush=True)
                raise
        backend.close()
        if group.rank == 0:
            print(f"{shape} SMs {num_sms}: {time.monotonic() - started:.1f} s", flush=True)


def corner_shapes(group: EPGroup, seed: int, cases_per_shape: int) -> None:
    check_shapes(group, random.Random(seed), SHAPES, cases_per_shape)


def random_shapes(group: EPGroup, seed: int, num_shapes: int) -> None:
    rng = random.Random(seed)
    shapes = [
        (
            rng.choice([2048, 4096, 5120, 7168, 8192, 16 * rng.randint(1, 300)]),
            rng.randint(8, 384),
            rng.randint(1, 10),
            rng.choice([1, 7, 64, 500, 2000, 8192]),
            rng.choice(["fp8", "same"]),
            rng.random() < 0.3,
        )
        for _ in range(num_shapes)
    ]
    check_shapes(group, rng, shapes, 3)


def two_in_flight(group: EPGroup) -> None:
    """Two handles overlap; each keeps its own rows."""
    config = make_config(group, (2048, 32, 4, 600, "fp8", False))
    backend = make(group, config)
    rng = random.Random(5)
    for _ in range(4):
        both = [random_tokens(rng, config, group.size, "uniform") for _ in range(2)]
        poison(backend)
        mine = [everyone[group.rank] for everyone in both]
        handles = [backend.dispatch_send(m.x_TH, m.slot_idx_TK, m.topk_weights_TK) for m in mine]
        received = [backend.dispatch_recv(handle) for handle in handles]
        for everyone, handle, got in zip(both, handles, received):
            want = fast_oracle.received(group.rank, config, everyone)
            assert_same_bits(got.x_RH.view(torch.uint8), want.x.view(torch.uint8), "x_RH")
            backend.combine_send(fast_oracle.outputs(group.rank, config, want), handle)
        for everyone, handle in zip(both, handles):
            want_TH = fast_oracle.combined(group.rank, config, everyone)
            assert_same_bits(backend.combine_recv(handle), want_TH, "y_TH")
    backend.close()


def many_epochs(group: EPGroup, num_steps: int) -> None:
    """Changing token counts and routings, the host never waits: no hang, no stale read, and the same bits again."""
    config = make_config(group, (1024, 8 * group.size, 4, 300, "same", False))
    backend = make(group, config, max_recv_rows=group.size * 300 * 4)
    run_epochs(group, backend, config, num_steps, [0, 1, 2, 31, 64, 300])


def graph_replay(group: EPGroup) -> None:
    """With a static bound a step can be captured, and replayed with new tokens in the same tensors."""
    config = make_config(group, (2048, 8 * group.size, 4, 256, "same", False))
    backend = make(group, config, max_recv_rows=group.size * 256 * 4)
    x = torch.zeros(256, 2048, dtype=torch.bfloat16, device="cuda")
    slots = torch.zeros(256, 4, dtype=torch.int64, device="cuda")
    weights = torch.zeros(256, 4, device="cuda")
    identity_step(backend, x, slots, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            y = identity_step(backend, x, slots, weights)
    generator = torch.Generator("cuda").manual_seed(100 + group.rank)
    for step in range(20):
        x.copy_(torch.randn(x.shape, device="cuda", generator=generator))
        slots.copy_(torch.randint(-1, config.num_slots, slots.shape, device="cuda", generator=generator))
        weights.copy_(torch.rand(weights.shape, device="cuda", generator=generator))
        y.fill_(float("nan"))
        graph.replay()
        assert_near(y, expected_identity(x, slots, weights), f"replay {step}")
        if step % 5 == 0:
            assert_near(identity_step(backend, x, slots, weights), expected_identity(x, slots, weights), "eager")
    backend.close()


def bad_input(group: EPGroup) -> None:
    config = make_config(group, (1024, 8 * group.size, 4, 32, "same", False))
    backend = make(group, config, max_recv_rows=40)
    exchange = RowExchange(group, 1 << 24, timeout_s=20.0)
    x = torch.zeros(32, 1024, dtype=torch.bfloat16, device="cuda")
    slots = torch.full((32, 4), -1, dtype=torch.int64, device="cuda")
    weights = torch.ones(32, 4, device="cuda")

    def refused(call, *words: str) -> None:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            assert all(word in str(error) for word in (f"[rank {group.rank}/{group.size}]", *words)), error
            return
        raise AssertionError(f"nothing was raised; expected {words}")

    refused(lambda: backend.dispatch_send(x.cpu(), slots, weights), "x_TH is on cpu")
    refused(lambda: backend.dispatch_send(x, slots, weights, 2), "num_rounds=2")
    slots[1, 2] = config.num_slots
    handle, received = backend.dispatch(x, slots, weights)
    torch.cuda.synchronize()
    refused(lambda: backend.combine(received.x_RH, handle), f"slot_idx_TK[1, 2] = {config.num_slots} ", "-1 to mask")
    backend.combine(received.x_RH, handle)
    slots[:] = 8 * group.rank  # 128 rows for room for 40
    handle, received = backend.dispatch(x, slots, weights)
    torch.cuda.synchronize()
    refused(lambda: backend.combine(received.x_RH, handle), f"rank {group.rank} ", "room for 40", "static bound")
    backend.combine(received.x_RH, handle)
    torch.cuda.synchronize()
    assert backend.kernels.failure.words[0] == 0
    narrow = x[:, :4].contiguous()
    refused(lambda: exchange.dispatch(x, num_experts=3 * group.size + 1), "num_experts")
    refused(lambda: exchange.dispatch(narrow, num_experts=group.size), "8 B", "16")
    refused(lambda: exchange.dispatch(x, num_experts=group.size), "topk_idx")
    refused(lambda: exchange.dispatch(x[:, ::2], num_experts=group.size), "contiguous")
    huge = torch.zeros(8192, 1024, dtype=torch.bfloat16, device="cuda")
    routing: dict[str, Any] = {
        "topk_idx_TK": torch.zeros(8192, 1, dtype=torch.int64, device="cuda"),
        "topk_weights_TK": torch.ones(8192, 1, device="cuda"),
    }
    refused(lambda: exchange.dispatch(huge, num_experts=group.size, num_worst_rows=10_000, **routing), "num_bytes")
    torch.cuda.synchronize()
    group.barrier()
    backend.close()
    exchange.close()
