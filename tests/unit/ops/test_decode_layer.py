"""A step of decodes through half a layer in one operator: to the bit what the operators give one by one, at every
instruction set, format of weights and number of threads. The operators have oracles of their own."""

import pytest
import torch

from eprt import ops
from eprt.ops.attention import PagedContext
from eprt.ops.decode_layer import DecodeAttention, DecodeContext, DecodeExperts, NormedProjection
from eprt.ops.elementwise import Rotation
from eprt.ops.gate import GateRule
from eprt.ops.rows import place_rows, sum_rows
from eprt.ops.weight import Weight, quantize_fp8, quantize_int8
from tests.unit.ops.test_linear import isa  # noqa: F401

HIDDEN, INNER, SHARED, EXPERTS, TOP_K = 160, 40, 72, 12, 3  # no multiples of a register or a block
HEADS, NOPE, ROPE, VALUE, LATENT, Q_LATENT = 5, 24, 16, 20, 48, 56
PAGE, NUM_PAGES = 8, 400
FORMATS = {"float32": Weight, "bfloat16": lambda w: Weight(w.bfloat16()), "fp8": quantize_fp8, "int8": quantize_int8}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

dtypes = pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
formats = pytest.mark.parametrize("make_weight", FORMATS.values(), ids=FORMATS)


@pytest.fixture(params=(1, 3))
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Draw:
    """Seeded numbers."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) * scale

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)


# -- attention --


def attention(draw: Draw, dtype: torch.dtype, make_weight, has_q_b: bool, has_bias: bool) -> DecodeAttention:
    def projection(n: int, k: int) -> tuple[Weight, torch.Tensor | None]:
        return make_weight(draw(n, k, scale=k**-0.5)), draw(n) if has_bias else None

    queries = HEADS * (NOPE + ROPE)
    first = Q_LATENT if has_q_b else queries
    o, o_bias = projection(HIDDEN, HEADS * VALUE)
    q_b = NormedProjection(draw(Q_LATENT).to(dtype), 1e-6, *projection(queries, Q_LATENT)) if has_q_b else None
    angle = draw(64, ROPE // 2)
    return DecodeAttention(
        NormedProjection(draw(HIDDEN).to(dtype), 1e-5, *projection(first + LATENT + ROPE, HIDDEN)),
        q_b,
        draw(LATENT).to(dtype),
        1e-6,
        torch.cat((angle.cos(), angle.sin()), dim=-1),
        has_bias,
        draw(HEADS * (NOPE + VALUE), LATENT, scale=LATENT**-0.5).to(dtype),
        HEADS,
        NOPE,
        0.2,
        o,
        o_bias,
        draw(HIDDEN),  # fp32 beside rows of any type
        1e-5,
    )


def context(draw: Draw, lengths: list[int], dtype: torch.dtype) -> DecodeContext:
    seq_len = torch.tensor(lengths, dtype=torch.int32)
    num_pages = -(-max(lengths) // PAGE)
    table = torch.randperm(NUM_PAGES, generator=draw.generator)[: len(lengths) * num_pages]
    table_TP = table.view(len(lengths), num_pages).int()
    position_T = seq_len.long() - 1
    slot_T = table_TP.long().gather(1, position_T[:, None] // PAGE)[:, 0] * PAGE + position_T % PAGE
    pages = draw(NUM_PAGES, PAGE, LATENT + ROPE).to(dtype)
    return DecodeContext(pages, slot_T, position_T.clamp(max=63), table_TP, seq_len)


def attend_one_by_one(x_TH: torch.Tensor, w: DecodeAttention, c: DecodeContext) -> tuple[torch.Tensor, torch.Tensor]:
    q_TA = ops.norm_linear(x_TH, w.qkv_a.norm_K, w.qkv_a.eps, w.qkv_a.weight, w.qkv_a.bias_N)
    q_TA, kv_TD = q_TA.split([q_TA.shape[1] - LATENT - ROPE, LATENT + ROPE], dim=-1)
    if w.q_b is not None:
        q_TA = ops.norm_linear(q_TA, w.q_b.norm_K, w.q_b.eps, w.q_b.weight, w.q_b.bias_N)
    q_nope, q_rope = q_TA.view(-1, HEADS, NOPE + ROPE).split([NOPE, ROPE], dim=-1)
    rotation = Rotation(w.cos_sin_PR, c.position_T, w.interleaved)
    ops.latent_insert(c.kv_pages, c.kv_slot_T, kv_TD, w.kv_norm_L, w.kv_eps, rotation)
    paged = PagedContext(c.kv_pages, c.page_table_TP, c.seq_len_T)
    attended = ops.mla_decode(q_nope, q_rope, paged, w.w_kv_b, w.softmax_scale, rotation)
    return ops.add_rms_norm(ops.linear(attended.flatten(1), w.o, w.o_bias_H), x_TH, w.next_norm_H, w.next_eps)


@formats
@dtypes
@pytest.mark.parametrize("lengths", [[1], [9, 1, 640, 33], list(range(1, 20))], ids=["one", "a few", "many"])
def test_attention_is_its_operators_to_the_bit(isa, threads, dtype, make_weight, lengths):  # noqa: F811
    for has_q_b, has_bias in ((False, False), (True, True)):
        draw = Draw(len(lengths))
        weights = attention(draw, dtype, make_weight, has_q_b, has_bias)
        x_TH, there = draw(len(lengths), HIDDEN).to(dtype), context(draw, lengths, dtype)
        again = there._replace(kv_pages=there.kv_pages.clone())
        both = ops.attend_decodes(x_TH, weights.arguments, there)
        assert both is not None
        h_TH, sum_TH = both
        want_h, want_sum = attend_one_by_one(x_TH, weights, again)
        assert torch.equal(h_TH, want_h) and torch.equal(sum_TH, want_sum)
        assert torch.equal(there.kv_pages, again.kv_pages)


@pytest.mark.parametrize(
    "field, index, value",
    [
        ("kv_slot_T", 1, NUM_PAGES * PAGE),
        ("kv_slot_T", 0, -1),
        ("position_T", 2, 64),
        ("page_table_TP", (1, 0), NUM_PAGES),
        ("seq_len_T", 2, 1000),
    ],
)
def test_nothing_is_written_where_a_place_is_outside(field, index, value):
    draw = Draw(0)
    weights = attention(draw, torch.float32, Weight, True, False)
    x_TH, there = draw(3, HIDDEN), context(draw, [4, 9, 2], torch.float32)
    getattr(there, field)[index] = value
    before = there.kv_pages.clone()
    assert ops.attend_decodes(x_TH, weights.arguments, there) is None
    assert torch.equal(there.kv_pages, before)


# -- experts --


def experts(draw: Draw, dtype: torch.dtype, make_weight, scoring: str, has_shared: bool) -> DecodeExperts:
    def stack(n: int, k: int) -> Weight:
        parts = [make_weight(draw(n, k, scale=k**-0.5)) for _ in range(EXPERTS + 2)]
        data = torch.stack([part.data.view(torch.uint8) for part in parts]).view(parts[0].data.dtype)
        scales = [part.scale for part in parts if part.scale is not None]
        return Weight(data, torch.stack(scales) if scales else None)

    inner = 128 if make_weight is quantize_fp8 else INNER  # whole blocks, as pools have
    slot_L = torch.randperm(EXPERTS, generator=draw.generator)
    rule = GateRule(scoring, TOP_K, 4, 2, scoring == "sigmoid", 2.5)
    shared_inner = 128 if make_weight is quantize_fp8 else SHARED
    shared = make_weight(draw(2 * shared_inner, HIDDEN, scale=0.1)), make_weight(draw(HIDDEN, shared_inner, scale=0.1))
    return DecodeExperts(
        draw(EXPERTS, HIDDEN, scale=HIDDEN**-0.5).to(dtype),
        draw(EXPERTS, scale=0.1) if scoring == "sigmoid" else None,
        rule,
        torch.cat((slot_L, torch.tensor([-1]))),
        torch.randperm(EXPERTS + 2, generator=draw.generator)[:EXPERTS].int(),
        stack(2 * inner, HIDDEN),
        stack(HIDDEN, inner),
        shared if has_shared else None,
        torch.arange(EXPERTS),
    )


def mix_one_by_one(h_TH: torch.Tensor, token_id_T: torch.Tensor, e: DecodeExperts):
    logits_TE = ops.linear(h_TH, Weight(e.gate_EH), out_dtype=torch.float32)
    weights_TK, expert_idx_TK, slot_idx_TK = ops.gate_slots(logits_TE, e.bias_E, e.rule, token_id_T, e.slot_L)
    row_TK, token_R, count_S = place_rows(slot_idx_TK, EXPERTS)
    y_RH = ops.grouped_experts(h_TH[token_R], count_S, e.w13, e.w2, None, e.matrix_S)
    y_TH = sum_rows(y_RH, row_TK, weights_TK)
    if e.shared is not None:
        y_TH = y_TH + ops.silu_linear(ops.linear(h_TH, e.shared[0]), e.shared[1])
    return y_TH, expert_idx_TK, count_S


@formats
@dtypes
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_experts_are_their_operators_to_the_bit(isa, threads, dtype, make_weight, num_tokens):  # noqa: F811
    for scoring, has_shared in (("softmax", True), ("sigmoid", True), ("softmax", False)):
        draw = Draw(num_tokens)
        weights = experts(draw, dtype, make_weight, scoring, has_shared)
        h_TH, token_id_T = draw(num_tokens, HIDDEN).to(dtype), draw.integers(0, 100, num_tokens)
        if num_tokens > 1:
            token_id_T[1] = -1  # padding
        before = weights.load_S.clone()
        got = ops.mix_decodes(h_TH, token_id_T, weights)
        want_y, want_expert, count_S = mix_one_by_one(h_TH, token_id_T, weights)
        assert torch.equal(got.y_TH, want_y) and torch.equal(got.expert_idx_TK, want_expert)
        assert torch.equal(weights.load_S, before + count_S)
        assert got.num_tokens == num_tokens - (num_tokens > 1) and got.compute_ns > 0


def test_an_expert_without_slot_adds_nothing():
    draw = Draw(3)
    weights = experts(draw, torch.float32, Weight, "softmax", True)
    weights.slot_L[:-1] = -1
    h_TH = draw(2, HIDDEN)
    got = ops.mix_decodes(h_TH, torch.zeros(2, dtype=torch.int64), weights)
    assert got.num_tokens == 0 and (got.expert_idx_TK >= 0).all()
    assert weights.shared is not None
    assert torch.equal(got.y_TH, ops.silu_linear(ops.linear(h_TH, weights.shared[0]), weights.shared[1]))


@pytest.mark.parametrize("matrix", [-1, EXPERTS + 2])
def test_a_slot_without_matrix_is_refused_before_anything_is_counted(matrix):
    draw = Draw(4)
    weights = experts(draw, torch.float32, Weight, "softmax", False)
    weights.matrix_S[:] = matrix
    before = weights.load_S.clone()
    with pytest.raises(ValueError, match="have matrices"):
        ops.mix_decodes(draw(2, HIDDEN), torch.zeros(2, dtype=torch.int64), weights)
    assert torch.equal(weights.load_S, before)
