"""What every rank does in test_nvlink_normal.py: normal mode, as verbs and as per-token rows, against an oracle.

SentTokens of all ranks are made on all ranks from one seed, so each rank knows what it must receive.
"""

import dataclasses
import os
import random
import signal as signals
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eprt.compat.deep_ep.rows import RowExchange
from eprt.compat.deep_ep.rows_received import ReceivedRows
from eprt.ep.config import EPConfig
from eprt.ep.errors import EPTimeoutError
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.normal_backend import NvlinkNormalBackend
from eprt.ep.nvlink.options import NvlinkOptions
from eprt.ep.reference import SentTokens
from eprt.ep.registry import make_backend
from tests.gpu import fast_oracle
from tests.gpu.cases_nvlink import assert_near, expected_identity, identity_step, run_epochs
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
ROWS_NUM_SMS = [None, 2, 24]


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


# -- per-token rows --


@dataclasses.dataclass(frozen=True)
class Expected:
    """What RowExchange.dispatch must give, from everybody's tokens."""

    source: Tensor
    token: Tensor
    idx: Tensor
    weights: Tensor
    sent: Tensor
    rows_of_expert: list[int]


def expected_rows(rank: int, num_experts: int, tokens: Sequence[SentTokens], alignment: int) -> Expected:
    local, R = num_experts // len(tokens), len(tokens)
    source, token, idx, weights, sent = [], [], [], [], []
    for s, sent_tokens in enumerate(tokens):
        slots = sent_tokens.slot_idx_TK.long()
        here = (slots >= 0) & (slots // local == rank)
        mine = here.any(1).nonzero().flatten()
        source.append(torch.full_like(mine, s))
        token.append(mine)
        idx.append(torch.where(here, slots % local, -1)[mine])
        weights.append(torch.where(here, sent_tokens.topk_weights_TK, 0)[mine])
        to_rank = torch.where(slots >= 0, slots // local, R)
        sent.append(torch.stack([(to_rank == r).any(1).sum() for r in range(R)]))
    idx_NK = torch.cat(idx)
    count = torch.bincount(idx_NK[idx_NK >= 0], minlength=local)
    return Expected(
        torch.cat(source),
        torch.cat(token),
        idx_NK,
        torch.cat(weights),
        torch.stack(sent),
        (-(-count // alignment) * alignment).tolist(),
    )


def check_received(rank: int, got: ReceivedRows, want: Expected, x: Sequence[Tensor], static: bool) -> None:
    N = len(want.source)
    assert got.x_NH.shape[0] == got.handle.num_rows and (static or got.x_NH.shape[0] == N)
    values = torch.zeros_like(got.x_NH[:N])
    for s, x_TH in enumerate(x):
        rows = want.source == s
        values.view(torch.uint8)[rows] = x_TH.view(torch.uint8)[want.token[rows]]
    assert_same_bits(got.x_NH[:N].view(torch.uint8), values.view(torch.uint8), "x")
    assert got.topk_idx_NK is not None and got.topk_weights_NK is not None
    assert torch.equal(got.topk_idx_NK[:N], want.idx)
    assert (got.topk_idx_NK[N:] == -1).all()
    assert torch.equal(got.topk_weights_NK[:N], want.weights)
    assert torch.equal(got.handle.source_token_N[:N].long(), want.token)
    assert torch.equal(got.handle.sent_RR.long(), want.sent)
    if not static:
        assert got.rows_of_expert == want.rows_of_expert


def rows_once(group: EPGroup, exchange: RowExchange, rng: random.Random, shape: Sequence, skew: str) -> None:
    config, R, rank = make_config(group, shape), group.size, group.rank
    everyone = random_tokens(rng, config, R, skew)
    mine, fp8 = everyone[rank], config.payload == "fp8"
    T, local = mine.x_TH.shape[0], config.num_slots // R
    alignment, static = rng.choice([1, 128]), rng.random() < 0.4
    sms = rng.choice(ROWS_NUM_SMS)
    payloads = [fast_oracle.payload(config, t.x_TH) for t in everyone]
    want = expected_rows(rank, config.num_slots, everyone, alignment)
    bound = sum(t.x_TH.shape[0] for t in everyone) + 5 if static else 0
    x, scale = payloads[rank]
    if scale is not None and rng.random() < 0.5:
        scale = scale.t().contiguous().t()
    got = exchange.dispatch(
        x,
        scale_TG=scale,
        num_experts=config.num_slots,
        topk_idx_TK=mine.slot_idx_TK,
        topk_weights_TK=mine.topk_weights_TK,
        num_worst_rows=bound,
        expert_alignment=alignment,
        num_sms=sms,
    )
    check_received(rank, got, want, [p[0] for p in payloads], static)
    N = len(want.source)
    if fp8:
        assert got.scale_NG is not None
        all_scales = [p[1] for p in payloads if p[1] is not None]
        scales = torch.cat([each[want.token[want.source == s]] for s, each in enumerate(all_scales)])
        assert_same_bits(got.scale_NG[:N].contiguous(), scales.contiguous(), "scale")
    # the same layout again, bf16
    again = [torch.flip(t.x_TH, (0,)) for t in everyone]
    rows, _ = exchange.dispatch_again(again[rank], got.handle)
    wanted = torch.cat([again[s][want.token[want.source == s]] for s in range(R)])
    assert_same_bits(rows[:N].contiguous(), wanted, "again")
    # and back
    biases = tuple(torch.randn(T, config.hidden_size, device="cuda").bfloat16() for _ in range(rng.randrange(3)))
    y = (rows.float() * (rank + 1)).bfloat16()
    weights = got.topk_weights_NK if rng.random() < 0.7 else None
    out, out_weights = exchange.combine(y, got.handle, topk_weights_NK=weights, biases_TH=biases, num_sms=sms)
    slots = mine.slot_idx_TK.long()
    sums = torch.zeros(T, config.hidden_size, device="cuda")
    for bias in biases:
        sums = sums + bias.float()
    for r in range(R):
        here = ((slots >= 0) & (slots // local == r)).any(1, keepdim=True)
        sums = torch.where(here, sums + (again[rank].float() * (r + 1)).bfloat16().float(), sums)
    assert_same_bits(out + 0.0, sums.bfloat16() + 0.0, "combine")
    if weights is not None:
        assert out_weights is not None
        assert torch.equal(out_weights, torch.where(slots >= 0, mine.topk_weights_TK, 0))
    bare = dispatch_without_experts(exchange, x, scale, slots, config.num_slots, alignment)
    assert_same_bits(bare.x_NH.view(torch.uint8), got.x_NH[:N].view(torch.uint8), "x without experts")
    assert bare.rows_of_expert == want.rows_of_expert and bare.topk_idx_NK is None


def dispatch_without_experts(
    exchange: RowExchange, x_TH: Tensor, scale_TG: Tensor | None, slots_TK: Tensor, num_slots: int, alignment: int
) -> ReceivedRows:
    """The same rows, but all that is said of the routing is to which ranks each token goes, and each expert's count."""
    R = exchange.kernels.group.size
    local = num_slots // R
    in_rank = torch.stack([((slots_TK >= 0) & (slots_TK // local == r)).any(1) for r in range(R)], 1)
    per_expert = torch.bincount(slots_TK[slots_TK >= 0], minlength=num_slots).int()
    return exchange.dispatch(
        x_TH,
        scale_TG=scale_TG,
        num_experts=num_slots,
        is_token_in_rank_TR=in_rank,
        num_tokens_per_expert_S=per_expert,
        expert_alignment=alignment,
    )


def watch_launches_ahead(exchange: RowExchange) -> list[bool]:
    """For each dispatch that is launched before its counts are there: whether it was in vain."""
    finish_dispatch, in_vain = exchange._finish_dispatch, []

    def finish_and_note(tensors: Any, plan: Any, block: Any, ahead: Any, rows: int) -> bool:
        in_vain.append(block is None or rows > ahead.capacity)
        return finish_dispatch(tensors, plan, block, ahead, rows)

    exchange._finish_dispatch = finish_and_note
    return in_vain


def check_launches_ahead(group: EPGroup, in_vain: list[bool]) -> None:
    """There have been both, where ranks differ."""
    everyones = {vain for mine in group.allgather(in_vain) for vain in mine}
    assert everyones == ({False} if group.size == 1 else {False, True}), everyones


def token_rows(group: EPGroup, seed: int, cases_per_shape: int) -> None:
    poison_new_tensors()
    exchange = RowExchange(group, 3 << 30, timeout_s=20.0)
    rng, in_vain = random.Random(seed), watch_launches_ahead(exchange)
    for number, shape in enumerate(SHAPES):
        for case in range(cases_per_shape):
            skew = SKEWS[(case + number) % len(SKEWS)]
            exchange.kernels.memory.view(exchange.kernels.data_begin, (1 << 30,), torch.uint8).fill_(0xFF)
            try:
                rows_once(group, exchange, rng, shape, skew)
            except BaseException:
                print(shape, case, skew, flush=True)
                raise
    check_launches_ahead(group, in_vain)
    exchange.close()


def many_row_epochs(group: EPGroup, num_steps: int) -> None:
    """Every step another hidden size, payload, top-k, number of experts, of tokens and of thread blocks; the host never
    waits. Rows come back as they were, so a token's sum is itself times the ranks it went to: exact in fp32."""
    exchange = RowExchange(group, 1 << 29, timeout_s=20.0)
    R, same, mine = group.size, random.Random(7), random.Random(100 + group.rank)
    generator = torch.Generator("cuda").manual_seed(group.rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(num_steps):
        hidden, K, experts = same.choice([16, 1008, 2048, 7168]), same.randint(1, 10), R * same.randint(1, 384 // R)
        T = mine.choice([0, 1, 2, 31, 64, 300])
        x = torch.randn(T, hidden, device="cuda", generator=generator).bfloat16()
        slots = torch.randint(-1, experts, (T, K), device="cuda", generator=generator, dtype=torch.int64)
        if step % 7 == 0:
            slots %= experts // R  # all to rank 0
        weights = torch.rand(T, K, device="cuda", generator=generator)
        sms = same.choice([None, 1, 3, 8, 24])
        got = exchange.dispatch(
            x, num_experts=experts, topk_idx_TK=slots, topk_weights_TK=weights, num_worst_rows=R * 300, num_sms=sms
        )
        rows = got.x_NH
        if step % 3 == 0:
            x = torch.randn(T, hidden, device="cuda", generator=generator).bfloat16()
            rows, _ = exchange.dispatch_again(x, got.handle, num_sms=sms)
        out, out_weights = exchange.combine(rows, got.handle, topk_weights_NK=got.topk_weights_NK, num_sms=sms)
        ranks = torch.where(slots >= 0, slots // (experts // R), R)
        num_ranks = torch.stack([(ranks == r).any(1) for r in range(R)]).sum(0)
        wrong += (out + 0.0 != (x.float() * num_ranks[:, None]).bfloat16() + 0.0).sum()
        assert out_weights is not None
        wrong += (out_weights != torch.where(slots >= 0, weights, 0)).sum()
    assert int(wrong) == 0, f"{int(wrong)} values are wrong"
    exchange.close()


# -- failure --


def killed_rank(group: EPGroup, victim: int) -> None:
    """A rank is killed between two steps; the others are told who, go on without it, and their results stay right."""
    config = make_config(group, (2048, 8 * group.size, 4, 200, "same", False), timeout_s=1.0)
    backend = make(group, config, max_recv_rows=group.size * 200 * 4)
    generator = torch.Generator("cuda").manual_seed(group.rank)

    def step(masked: tuple[int, ...]) -> None:
        x = torch.randn(200, 2048, device="cuda", generator=generator).bfloat16()
        slots = torch.randint(0, config.num_slots, (200, 4), device="cuda", generator=generator)
        weights = torch.rand(200, 4, device="cuda", generator=generator)
        got = identity_step(backend, x, slots, weights)
        for rank in masked:
            slots = torch.where(slots // 8 == rank, -1, slots)
        torch.cuda.synchronize()
        assert_near(got, expected_identity(x, slots, weights), f"step without {masked}")

    for _ in range(5):
        step(())
    group.barrier()
    if group.rank == victim:
        os.kill(os.getpid(), signals.SIGKILL)
    while victim not in group.lost_ranks():
        time.sleep(0.01)
    step((victim,))  # runs into the deadline, without the victim's outputs
    try:
        step((victim,))
        raise AssertionError("the deadline passed without an error")
    except EPTimeoutError as error:
        assert error.rank == group.rank and error.peer == victim and "dispatch" in error.phase, error
        print(error)
    assert backend.query_mask().tolist() == [int(r == victim) for r in range(group.size)]
    before = time.monotonic()
    for _ in range(50):
        step((victim,))
    assert time.monotonic() - before < 5, "masked ranks must not be waited for"
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


def late_rank(group: EPGroup) -> None:
    """Statistics name who was waited for."""
    config = make_config(group, (1024, 8 * group.size, 4, 64, "same", False))
    backend = make(group, config, max_recv_rows=group.size * 64 * 4)
    x = torch.ones(64, 1024, dtype=torch.bfloat16, device="cuda")
    slots = (torch.arange(256, device="cuda") % config.num_slots).view(64, 4)
    for _ in range(3):
        identity_step(backend, x, slots, torch.ones(64, 4, device="cuda"))
    backend.stats(reset=True)
    group.barrier()
    if group.rank == group.size - 1:
        torch.cuda._sleep(10_000_000)  # about 5 ms
    identity_step(backend, x, slots, torch.ones(64, 4, device="cuda"))
    stats = backend.stats()
    if group.rank != group.size - 1:
        assert stats.dispatch_wait_us_N[-1] > 1000 and stats.dispatch_wait_us_N[:-1].max() < 1000, stats
    assert stats.compute_us > 0
    backend.close()
