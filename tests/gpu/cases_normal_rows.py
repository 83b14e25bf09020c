"""What every rank does in test_normal.py: normal mode as per-token rows, against an oracle."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eprt.compat.deep_ep.rows import RowExchange
from eprt.compat.deep_ep.rows_received import ReceivedRows
from eprt.ep.group.group import EPGroup
from eprt.ep.reference import SentTokens
from tests.gpu import fast_oracle
from tests.gpu.cases_normal import SHAPES, SKEWS, make_config, poison_new_tensors, random_tokens
from tests.ranks.cases_ep import assert_same_bits

ROWS_NUM_SMS = [None, 2, 24]


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
    assert torch.equal(got.handle.buffers.field("sent").long(), want.sent)
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
