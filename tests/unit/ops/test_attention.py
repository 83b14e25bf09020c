"""MLA kernels against the oracle and against themselves: every instruction set, dtype and odd shape; and the promise
that a row's bits depend on nothing but its own context."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eprt.ops import attention, elementwise
from eprt.ops.attention import PagedContext
from eprt.ops.elementwise import Rotation
from eprt.ops.kv_format import KVFormat
from tests import reference_ops as reference

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = {  # queries, cache, weight
    "fp32": (F32, F32, F32),
    "bf16": (BF16, BF16, BF16),
    "bf16-cache": (F32, BF16, F32),
    "bf16-cache-weight": (F32, BF16, BF16),
    "fp32-weight": (BF16, BF16, F32),
}


@dataclass(frozen=True)
class Shape:
    heads: int
    nope: int
    rope: int
    value: int
    lora: int
    page_size: int


DEEPSEEK = Shape(heads=16, nope=128, rope=64, value=128, lora=512, page_size=16)
SHAPES = [
    DEEPSEEK,
    Shape(heads=3, nope=24, rope=8, value=20, lora=40, page_size=5),
    Shape(heads=20, nope=33, rope=7, value=17, lora=35, page_size=16),  # nothing is even
    Shape(heads=128, nope=16, rope=8, value=16, lora=32, page_size=1),
    Shape(heads=1, nope=1, rope=2, value=1, lora=1, page_size=64),
    Shape(heads=70, nope=8, rope=0, value=72, lora=66, page_size=3),  # no rotated part
]


@dataclass(frozen=True)
class Case:
    """The arguments of mla_extend, those of its PagedContext one by one."""

    q_nope: torch.Tensor
    q_rope: torch.Tensor
    kv_pages: torch.Tensor
    page_table: torch.Tensor
    seq_len: torch.Tensor
    query_start: torch.Tensor
    w_kv_b: torch.Tensor
    softmax_scale: float

    def extend(self, op=attention.mla_extend):
        context = PagedContext(self.kv_pages, self.page_table, self.seq_len, self.query_start)
        return op(self.q_nope, self.q_rope, context, self.w_kv_b, self.softmax_scale)

    def decode(self, op=attention.mla_decode):
        context = PagedContext(self.kv_pages, self.page_table, self.seq_len)
        return op(self.q_nope, self.q_rope, context, self.w_kv_b, self.softmax_scale)


def make_case(shape, dtypes, seq_lens, new_tokens, seed=0):
    """Scattered pages; the table is wider than needed and holds garbage past each request's end; queries are the
    strided halves of one projection; unused cache rows hold NaN."""
    g = torch.Generator().manual_seed(seed)
    q_dtype, kv_dtype, w_dtype = dtypes
    num_pages = [-(-n // shape.page_size) for n in seq_lens]
    order = torch.randperm(sum(num_pages) + 3, generator=g).tolist()
    table = torch.full((len(seq_lens), max(num_pages, default=0) + 2), -(2**31), dtype=torch.int32)
    kv_dim = shape.lora + shape.rope
    kv_pages = torch.full((len(order), shape.page_size, kv_dim), float("nan"))
    for b, seq_len in enumerate(seq_lens):
        pages = [order.pop() for _ in range(num_pages[b])]
        table[b, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        for i, page in enumerate(pages):
            n = min(shape.page_size, seq_len - i * shape.page_size)
            kv_pages[page, :n] = torch.randn(n, kv_dim, generator=g)
    q = torch.randn(sum(new_tokens), shape.heads, shape.nope + shape.rope, generator=g).to(q_dtype) * 1.5
    w_kv_b = torch.randn(shape.heads * (shape.nope + shape.value), shape.lora, generator=g) * shape.lora**-0.5
    return Case(
        *q.split([shape.nope, shape.rope], dim=-1),
        KVFormat(shape.lora, shape.rope, kv_dtype).encode(kv_pages.flatten(0, 1)).unflatten(0, kv_pages.shape[:2]),
        table,
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.tensor([0, *new_tokens]).cumsum(0).to(torch.int32),
        w_kv_b.to(w_dtype),
        (shape.nope + shape.rope) ** -0.5,
    )


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def assert_close(got, want, dtypes):
    """Relative to the size of the whole row: fp32 sums of up to 1500 terms, or one bf16 rounding per intermediate."""
    assert got.shape == want.shape and got.dtype == want.dtype and got.is_contiguous()
    error = (got.float() - want.float()).norm(dim=-1)
    bound = 2e-5 if dtypes[0] == F32 else 2e-2
    assert (error <= bound * (want.float().norm(dim=-1) + 0.05)).all(), f"largest error {error.max()}"


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode(isa, shape, dtypes):
    seq_lens = [1, 513, 64, 700, 2]  # one position; one past a split; a whole block; ragged; an odd pair
    case = make_case(shape, dtypes, seq_lens, [1] * 5)
    assert_close(case.decode(), case.decode(reference.mla_decode), dtypes)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_extend(isa, shape, dtypes):
    seq_lens, new = [1, 300, 129, 257, 40], [1, 60, 129, 0, 3]  # with, without and entirely of prefix
    case = make_case(shape, dtypes, seq_lens, new)
    assert_close(case.extend(), case.extend(reference.mla_extend), dtypes)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [DEEPSEEK, SHAPES[1], SHAPES[3]], ids=str)
def test_an_fp8_cache(isa, shape, dtype):
    dtypes = (dtype, torch.uint8, dtype)
    case = make_case(shape, dtypes, [1, 200, 65], [1, 1, 1])
    assert_close(case.decode(), case.decode(reference.mla_decode), dtypes)
    case = make_case(shape, dtypes, [70, 129, 40], [70, 3, 0])
    assert_close(case.extend(), case.extend(reference.mla_extend), dtypes)


@pytest.mark.parametrize("dtypes", [DTYPES["fp32"], DTYPES["bf16"]], ids=["fp32", "bf16"])
def test_extend_by_one_token_agrees_with_decode(isa, dtypes):
    """The absorbed and the expanded form are the same function; only their roundings differ."""
    case = make_case(DEEPSEEK, dtypes, [5, 600, 128], [1, 1, 1])
    assert_close(case.decode(), case.extend(), dtypes)


def test_large_scores_do_not_overflow(isa):
    """Scores around +-3000: the online maximum keeps exp2 in range, and far-off positions weigh nothing."""
    case = make_case(SHAPES[1], DTYPES["fp32"], [600, 300], [1, 1])
    case = replace(case, q_nope=case.q_nope * 1000, q_rope=case.q_rope * 1000)
    assert case.decode().isfinite().all()
    torch.testing.assert_close(case.decode(), case.decode(reference.mla_decode), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(case.extend(), case.extend(reference.mla_extend), rtol=2e-3, atol=2e-3)


def take_requests(case, requests):
    """The same requests in another batch: order, neighbours and table width change."""
    starts = case.query_start.tolist()
    rows = torch.cat([torch.arange(starts[b], starts[b + 1]) for b in requests])
    lengths = torch.tensor([0] + [starts[b + 1] - starts[b] for b in requests])
    return replace(
        case,
        q_nope=case.q_nope[rows],
        q_rope=case.q_rope[rows],
        page_table=torch.nn.functional.pad(case.page_table[requests], (0, 4), value=-1),
        seq_len=case.seq_len[requests],
        query_start=lengths.cumsum(0).to(torch.int32),
    )


@pytest.mark.parametrize("dtypes", [DTYPES["fp32"], DTYPES["bf16"]], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [DEEPSEEK, SHAPES[1], SHAPES[3]], ids=str)
def test_decode_bits_do_not_depend_on_the_batch(isa, two_threads, shape, dtypes):
    case = make_case(shape, dtypes, [700, 1, 513, 1030, 64, 129], [1] * 6)
    together = case.decode()
    for b in range(6):
        assert torch.equal(take_requests(case, [b]).decode()[0], together[b])
    shuffled = take_requests(case, [3, 5, 0])
    assert torch.equal(shuffled.decode(), together[[3, 5, 0]])
    torch.set_num_threads(1)
    assert torch.equal(case.decode(), together)


@pytest.mark.parametrize("dtypes", [DTYPES["fp32"], DTYPES["bf16"]], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [DEEPSEEK, SHAPES[1], SHAPES[3]], ids=str)
def test_extend_bits_do_not_depend_on_the_batch(isa, two_threads, shape, dtypes):
    case = make_case(shape, dtypes, [200, 131, 1, 300], [70, 131, 1, 5])
    together = case.extend()
    starts = case.query_start.tolist()
    for b in range(4):
        assert torch.equal(take_requests(case, [b]).extend(), together[starts[b] : starts[b + 1]])
    torch.set_num_threads(1)
    assert torch.equal(case.extend(), together)


def extend_in_chunks(case, cuts):
    """One request, its prompt computed chunk by chunk up to each of `cuts`."""
    outputs = []
    for start, end in zip([0, *cuts], [*cuts, case.q_nope.shape[0]]):
        chunk = replace(
            case,
            q_nope=case.q_nope[start:end],
            q_rope=case.q_rope[start:end],
            seq_len=torch.tensor([end], dtype=torch.int32),
            query_start=torch.tensor([0, end - start], dtype=torch.int32),
        )
        outputs.append(chunk.extend())
    return torch.cat(outputs)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [DEEPSEEK, SHAPES[2]], ids=str)
def test_chunked_equals_one_shot_to_the_bit(isa, shape, dtypes):
    case = make_case(shape, dtypes, [330], [330])
    one_shot = case.extend()
    for cuts in ([128, 256], [1, 2, 3], [127, 129, 255, 257], [17, 200], [329]):
        assert torch.equal(extend_in_chunks(case, cuts), one_shot), cuts


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 280),
    cuts=st.sets(st.integers(1, 279), max_size=4),
    page_size=st.integers(1, 40),
    heads=st.integers(1, 18),
    dtypes=st.sampled_from([DTYPES["fp32"], DTYPES["bf16"]]),
)
def test_any_chunking(length, cuts, page_size, heads, dtypes):
    """On the widest instruction set: any prompt, any cuts, any page size, bit for bit; and right."""
    shape = Shape(heads=heads, nope=12, rope=6, value=10, lora=24, page_size=page_size)
    case = make_case(shape, dtypes, [length], [length])
    one_shot = case.extend()
    assert torch.equal(extend_in_chunks(case, sorted(c for c in cuts if c < length)), one_shot)
    assert_close(one_shot, case.extend(reference.mla_extend), dtypes)


@settings(max_examples=25, deadline=None)
@given(
    seq_lens=st.lists(st.integers(1, 1200), min_size=1, max_size=4),
    page_size=st.integers(1, 70),
    heads=st.integers(1, 140),
    dtypes=st.sampled_from([DTYPES["fp32"], DTYPES["bf16"]]),
)
def test_any_decode_batch(seq_lens, page_size, heads, dtypes):
    shape = Shape(heads=heads, nope=12, rope=6, value=10, lora=24, page_size=page_size)
    case = make_case(shape, dtypes, seq_lens, [1] * len(seq_lens))
    assert_close(case.decode(), case.decode(reference.mla_decode), dtypes)


def test_pages_of_one_layer_inside_a_pool(isa):
    """kv_pages may be a slice of a pool that holds all layers: its pages are then far apart."""
    case = make_case(SHAPES[1], DTYPES["fp32"], [40, 9], [1, 1])
    pool = torch.zeros(case.kv_pages.shape[0], 3, *case.kv_pages.shape[1:])
    pool[:, 1] = case.kv_pages
    strided = replace(case, kv_pages=pool[:, 1])
    assert torch.equal(strided.decode(), case.decode())
    assert torch.equal(strided.extend(), case.extend())


def test_empty_batch():
    case = make_case(SHAPES[1], DTYPES["fp32"], [], [])
    assert case.decode().shape == case.extend().shape == (0, 3, 20)
    idle = make_case(SHAPES[1], DTYPES["fp32"], [7, 3], [0, 0])
    assert idle.extend().shape == (0, 3, 20)


@pytest.mark.parametrize("kv_dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("page_dtype", [F32, BF16], ids=["pages32", "pages16"])
def test_cache_insert(isa, page_dtype, kv_dtype):
    for kv_dim in (1, 8, 37, 576):
        pages = torch.randn(6, 4, kv_dim).to(page_dtype)
        want = pages.clone()
        slot = torch.randperm(24)[:13]
        kv = torch.randn(13, kv_dim + 3).to(kv_dtype)[:, 3:]
        reference.cache_insert(want, slot, kv)
        attention.cache_insert(pages, slot.to(torch.int32), kv)
        assert torch.equal(pages, want)


def test_cache_insert_of_fp8_entries(isa):
    for lora, rope in ((32, 8), (512, 64)):
        entry = KVFormat(lora, rope, torch.uint8)
        pages = torch.randint(256, (6, 4, entry.width), dtype=torch.uint8)
        want, slot, kv = pages.clone(), torch.randperm(24)[:13], torch.randn(13, lora + rope + 3)[:, 3:]
        reference.cache_insert(want, slot, kv, rope)
        attention.cache_insert(pages, slot, kv, rope)
        assert torch.equal(pages, want)
        with pytest.raises(ValueError, match="rope_size=0"):
            attention.cache_insert(pages, slot, kv)
        with pytest.raises(ValueError, match=r"kv_slot\[1\] = 24 is outside the cache of 6 pages of 4"):
            attention.cache_insert(pages, torch.tensor([0, 24]), kv[:2], rope)
        with pytest.raises(ValueError, match=f"entries of {entry.width} bytes; these of {lora + 64 + rope} values"):
            attention.cache_insert(pages, slot, torch.randn(13, lora + 64 + rope), rope)


@pytest.mark.parametrize("kv_dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["pairs", "halves"])
def test_latent_insert_is_norm_rotation_and_insert(isa, kv_dtype, interleaved):
    rotation = Rotation(torch.randn(50, 8), torch.randint(50, (13,)), interleaved)
    for latent, page_dtype in ((37, F32), (512, BF16)):
        kv, weight = torch.randn(13, latent + 8 + 3).to(kv_dtype)[:, 3:], torch.rand(latent).to(kv_dtype)
        pages, slot = torch.randn(6, 4, latent + 8).to(page_dtype), torch.randperm(24)[:13]
        before, want = pages.clone(), pages.clone()
        normed = elementwise.rms_norm(kv[:, :latent], weight, 1e-6)
        rotated = elementwise.rope(kv[:, latent:].unsqueeze(1), rotation).squeeze(1)
        reference.cache_insert(want, slot, torch.cat((normed, rotated), dim=-1))
        attention.latent_insert(pages, slot.to(torch.int32), kv, weight, 1e-6, rotation)
        assert torch.equal(pages, want)

        far, full = rotation.position_T.clone(), slot.clone()
        far[5], full[2] = 50, 24
        kept = before.clone()
        with pytest.raises(ValueError, match=r"position\[5\] = 50 is outside the 50 of cos_sin"):
            attention.latent_insert(kept, slot, kv, weight, 1e-6, replace(rotation, position_T=far))
        with pytest.raises(ValueError, match=r"kv_slot\[2\] = 24 is outside the cache of 6 pages of 4"):
            attention.latent_insert(kept, full, kv, weight, 1e-6, rotation)
        assert torch.equal(kept, before)


def test_bf16_rounds_to_even_and_keeps_nan(isa):
    bits = torch.tensor(
        [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0x7F800001, 0x7FFFFFFF, -0x80000000]
    )
    kv = bits.to(torch.int32).view(F32)[None].repeat(1, 3)
    pages = torch.zeros(1, 1, 24, dtype=BF16)
    attention.cache_insert(pages, torch.tensor([0]), kv)
    torch.testing.assert_close(pages[0], kv.to(BF16), rtol=0, atol=0, equal_nan=True)


def table_with(entry):
    def change(case):
        table = case.page_table.clone()
        table[1, 2] = entry
        return replace(case, page_table=table)

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (table_with(99), r"page_table\[1, 2\] = 99 is outside the cache of \d+ pages"),
        (table_with(-1), r"page_table\[1, 2\] = -1 is outside"),
        (
            lambda c: replace(c, page_table=c.page_table[:, :2]),
            "request 1: 13 tokens need 3 pages of 5, page_table has 2",
        ),
        (lambda c: replace(c, seq_len=torch.tensor([4, 0])), "request 1: seq_len is 0"),
        (lambda c: replace(c, seq_len=torch.tensor([4])), "(2 queries|of 1 requests), but page_table has 2"),
        (lambda c: replace(c, w_kv_b=c.w_kv_b[:-1]), "w_kv_b has 131 rows"),
        (lambda c: replace(c, w_kv_b=c.w_kv_b[:, 1:]), r"w_kv_b has shape \(132, 39\)"),
        (lambda c: replace(c, q_rope=c.q_rope.bfloat16()), "q_rope is torch.bfloat16, must be torch.float32"),
        (lambda c: replace(c, kv_pages=c.kv_pages.half()), "kv_pages is torch.float16"),
        (lambda c: replace(c, softmax_scale=0.0), "softmax_scale=0.0"),
        (
            lambda c: replace(c, kv_pages=c.kv_pages.view(torch.uint8)),
            r"of \d+ bytes; 40 \+ 8 values take 64 in",
        ),
    ],
)
def test_bad_input_is_named(change, message):
    case = change(make_case(SHAPES[1], DTYPES["fp32"], [4, 13], [1, 1]))
    with pytest.raises(ValueError, match=message):
        case.decode()
    with pytest.raises(ValueError, match=message):
        case.extend()


@pytest.mark.parametrize("query_start", [[0, 3, 2], [1, 2, 2], [0, 1, 1], [0, 2, 3], [0, -1, 2]])
def test_bad_query_start_is_named(query_start):
    case = make_case(SHAPES[1], DTYPES["fp32"], [4, 13], [1, 1])
    with pytest.raises(ValueError, match="query_start gives it rows"):
        replace(case, query_start=torch.tensor(query_start)).extend()


def test_slot_outside_the_cache_is_named():
    pages = torch.zeros(2, 4, 8)
    with pytest.raises(ValueError, match=r"kv_slot\[1\] = 8 is outside the cache of 2 pages of 4 tokens"):
        attention.cache_insert(pages, torch.tensor([0, 8]), torch.ones(2, 8))
    assert not pages.any()
