"""The indexer's operators against the oracle: every instruction set and dtype; ties; a choice that is a query's own."""

import pytest
import torch

from eprt.ops import attention, indexer
from eprt.ops.attention import PagedContext
from eprt.ops.elementwise import Rotation
from eprt.ops.index_format import IndexFormat, hadamard
from tests import reference_ops as reference

F32, BF16, FP8 = torch.float32, torch.bfloat16, torch.uint8
DTYPES = [(F32, F32), (F32, FP8), (BF16, BF16), (BF16, FP8), (F32, BF16)]
dtypes = pytest.mark.parametrize("query, key", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def make_case(query: torch.dtype, key: torch.dtype, lengths=(70, 1, 300), heads=5, size=16, page_size=4, seed=0):
    """Of each request the last queries, up to eleven. Small whole numbers: every score is exact, and many are equal."""
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape: int, most: int = 2) -> torch.Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).float()

    num_pages = sum(-(-length // page_size) for length in lengths)
    order, tables, at = torch.randperm(num_pages, generator=generator).int(), [], 0
    for length in lengths:
        tables.append(order[at : (at := at + -(-length // page_size))])
    table_BP = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=-1)
    entry = IndexFormat(size, key)
    keys = entry.encode(whole(num_pages * page_size, size)).view(num_pages, page_size, -1)
    rows = [(b, seen) for b, length in enumerate(lengths) for seen in range(max(1, length - 10), length + 1)]
    request_T, length_T = torch.tensor(rows, dtype=torch.int32).T
    query_TND = whole(len(rows), heads, size).to(query)
    return query_TND, whole(len(rows), heads), keys, table_BP, request_T, length_T


@dtypes
@pytest.mark.parametrize("top_k", [1, 8, 69, 70, 64])
def test_the_best_tokens(isa, query, key, top_k):
    case = make_case(query, key)
    assert torch.equal(indexer.index_topk(*case, top_k), reference.index_topk(*case, top_k))


@pytest.mark.parametrize("heads, size, page_size", [(64, 128, 16), (1, 8, 1), (3, 20, 5), (70, 4, 64)])
def test_sizes(isa, heads, size, page_size):
    for query, key in ((F32, F32), (BF16, BF16)):
        case = make_case(query, key, (40, 2500), heads, size, page_size)
        assert torch.equal(indexer.index_topk(*case, 33), reference.index_topk(*case, 33))


def test_equal_scores_fall_to_the_lower_positions(isa):
    query_TND, weight_TN, keys, table_BP, request_T, length_T = make_case(F32, F32)
    for value in (0.0, 1.0):
        slot_TK = indexer.index_topk(
            query_TND * value, weight_TN, torch.ones_like(keys), table_BP, request_T, length_T, 9
        )
        for t, slots in enumerate(slot_TK.tolist()):
            first = [int(table_BP[request_T[t], i // 4]) * 4 + i % 4 for i in range(min(9, int(length_T[t])))]
            assert slots == first + [-1] * (9 - len(first))


@dtypes
def test_a_choice_does_not_depend_on_other_queries(isa, two_threads, query, key):
    """Scores of random numbers: a sum in another order would have other bits, and another choice now and then."""
    torch.manual_seed(3)
    _, _, _, table_BP, request_T, length_T = make_case(query, key)
    T = len(request_T)
    query_TND, weight_TN = torch.randn(T, 64, 32).to(query), torch.randn(T, 64)
    keys = (
        IndexFormat(32, key)
        .encode(torch.randn(int(table_BP.max() + 1) * 4, 32))
        .view(-1, 4, IndexFormat(32, key).width)
    )
    together = indexer.index_topk(query_TND, weight_TN, keys, table_BP, request_T, length_T, 50)
    for t in range(T):
        alone = slice(t, t + 1)
        one = query_TND[alone], weight_TN[alone], keys, table_BP, request_T[alone], length_T[alone]
        assert torch.equal(indexer.index_topk(*one, 50), together[alone]), t


def test_scores_that_are_no_numbers_come_last(isa):
    query_TND, weight_TN, keys, table_BP, request_T, length_T = make_case(F32, F32, (40,))
    bad = table_BP[0, 3] * 4
    keys.view(-1, 16)[bad] = float("nan")
    assert bad not in indexer.index_topk(query_TND, weight_TN.abs(), keys, table_BP, request_T, length_T, 25)


def test_keys_are_cached_as_their_format_says(isa):
    torch.manual_seed(0)
    for dtype in (F32, BF16, FP8):
        entry = IndexFormat(128, dtype)
        pages = torch.zeros(5, 4, entry.width, dtype=dtype)
        keys, slots = torch.randn(3, 128), torch.tensor([7, 0, 19])
        indexer.index_insert(pages, slots, keys)
        flat = pages.view(-1, entry.width)
        assert torch.equal(flat[slots], entry.encode(keys)) and not flat[[1, 6, 18]].any()
        with pytest.raises(ValueError, match=r"kv_slot\[1\] = 20 is outside the cache of 5 pages of 4 tokens"):
            indexer.index_insert(pages, torch.tensor([0, 20]), keys[:2])


def test_an_fp8_key_takes_132_bytes_and_keeps_its_products():
    entry = IndexFormat(128, FP8)
    assert entry.width == 132
    torch.manual_seed(0)
    keys, query = torch.randn(50, 128), torch.randn(128)
    keys[:, 5] *= 30  # an outlier, which the transform spreads
    matrix = hadamard(128, F32, torch.device("cpu")) * 128**-0.5
    assert torch.allclose(matrix @ matrix.T, torch.eye(128), atol=1e-6)
    exact, plain = keys @ query, entry.decode(entry.encode(keys)) @ query
    transformed = entry.decode(entry.encode(keys @ matrix)) @ (query @ matrix)
    assert (transformed - exact).norm() < 0.05 * exact.norm() and (plain - exact).norm() > 0
    scale = entry.encode(keys)[:, 128:].contiguous().view(F32)
    assert torch.equal(scale.log2(), scale.log2().round()), "powers of two"
    with pytest.raises(ValueError, match=r"index keys of a power of 2 .* not 96; use --kv-cache-dtype bf16"):
        IndexFormat(96, FP8)


@pytest.mark.parametrize("query", [F32, BF16])
@pytest.mark.parametrize("size", [16, 64, 128])
def test_fp4_keys_are_read_as_what_they_hold(isa, query, size):
    """Whole numbers, which fp4 holds: every score is exact."""
    query_TND, weight_TN, keys, *rows = make_case(query, F32, size=size)
    fp4 = IndexFormat(size, FP8, is_fp4=True)
    keys = keys * torch.tensor([0.25, 8.0, 1.0])[torch.arange(keys.shape[0]) % 3, None, None]
    stored = fp4.encode(keys)
    assert torch.equal(fp4.decode(stored), keys)
    for top_k in (8, 64):
        got = indexer.index_topk(query_TND, weight_TN, stored, *rows, top_k)
        assert torch.equal(got, reference.index_topk(query_TND, weight_TN, keys, *rows, top_k))


def test_an_fp4_key_takes_68_bytes_and_is_the_nearest_it_can_be():
    """Ties to the even code, each group by a scale of its own."""
    fp4 = IndexFormat(128, FP8, is_fp4=True)
    assert fp4.width == 68 and IndexFormat.of_pages(128, torch.empty(1, 1, 68, dtype=FP8)) == fp4
    assert IndexFormat.of_pages(128, torch.empty(1, 1, 132, dtype=FP8)) == IndexFormat(128, FP8)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.linspace(-6, 6, 32 * 97).view(-1, 32)
    numbers[:, 0] = 6  # the scale is 1
    ties = [0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 6]
    groups = torch.cat((numbers, torch.tensor(ties * 2)[None]))
    keys = torch.cat([groups * scale for scale in (1.0, 2.0**-30, 2.0**20, 0.0)], dim=1)
    stored = fp4.encode(keys)
    got = fp4.decode(stored)
    distance = (groups.abs()[..., None] - grid).abs()
    nearest = grid[distance.argmin(-1)] * groups.sign()
    assert torch.equal(got[:-1, :32], nearest[:-1])
    even = [0, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, 6]
    assert got[-1, :16].tolist() == even
    assert torch.equal(got[:, 32:64], got[:, :32] * 2.0**-30) and torch.equal(got[:, 64:96], got[:, :32] * 2.0**20)
    assert not got[:, 96:].any() and torch.equal(fp4.decode(fp4.encode(got)), got)
    with pytest.raises(ValueError, match=r"an fp4 index cache needs .* not 96; use --index-cache-dtype auto"):
        IndexFormat(96, FP8, is_fp4=True)


@pytest.mark.parametrize(("is_fp4", "least"), [(False, 0.96), (True, 0.87)])
def test_most_picks_among_random_keys_are_those_of_plain_keys(is_fp4, least):
    """512 of 4096, with V4's 64 heads: the hardest case, for many scores lie close to each other."""
    generator = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(4096, 128, generator=generator), torch.randn(4, 64, 128, generator=generator)
    weights = torch.rand(4, 64, generator=generator)
    matrix = hadamard(128, F32, torch.device("cpu")) * 128**-0.5
    table, request = torch.arange(64, dtype=torch.int32)[None], torch.zeros(4, dtype=torch.int32)
    rows = table, request, torch.full((4,), 4096, dtype=torch.int32), 512
    want = indexer.index_topk(queries, weights, keys.view(64, 64, 128), *rows)
    stored = IndexFormat(128, FP8, is_fp4).encode(keys @ matrix).view(64, 64, -1)
    got = indexer.index_topk(queries @ matrix, weights, stored, *rows)
    shared = [len(set(a) & set(b)) / 512 for a, b in zip(want.tolist(), got.tolist())]
    assert min(shared) >= least


@pytest.mark.parametrize("cache", [F32, FP8])
def test_attention_to_chosen_tokens(isa, cache):
    """It is attention to a short context that holds these alone."""
    torch.manual_seed(1)
    T, N, nope, rope, value, latent, num_slots = 5, 3, 16, 8, 12, 32, 40
    width = 32 + 2 * 8 + 16 if cache == FP8 else latent + rope
    pages = torch.zeros(num_slots // 4, 4, width, dtype=cache)
    attention.cache_insert(pages, torch.arange(num_slots), torch.randn(num_slots, latent + rope), rope)
    q_nope, q_rope, w = torch.randn(T, N, nope), torch.randn(T, N, rope), torch.randn(N * (nope + value), latent)
    angles = torch.rand(9, rope // 2)
    rotation = Rotation(torch.cat((angles.cos(), angles.sin()), 1), torch.arange(T), True)
    slot_TK = torch.stack([torch.randperm(num_slots)[:10].sort().values for _ in range(T)]).int()
    length_T = torch.tensor([10, 3, 10, 1, 7], dtype=torch.int32)
    out = indexer.mla_chosen(q_nope, q_rope, pages, slot_TK, length_T, w, 0.2, rotation)
    q_rope = reference.rope(q_rope, rotation)
    for t, length in enumerate(length_T.tolist()):
        chosen = pages.view(-1, 1, width)[slot_TK[t, :length].long()]
        context = PagedContext(chosen, torch.arange(length)[None], torch.tensor([length]))
        want = reference.mla_decode(q_nope[t : t + 1], q_rope[t : t + 1], context, w, 0.2)
        assert torch.allclose(out[t], want[0], atol=1e-4)


def test_what_does_not_fit_is_named():
    query_TND, weight_TN, keys, table_BP, request_T, length_T = make_case(F32, F32)
    for field, message in (
        ((request_T + 3, length_T), "query 0: sees 60 tokens of request 3, but there are 3 requests"),
        ((request_T, length_T + 400), "query 0: sees 460 tokens of request 0, .* of up to 75 pages of 4 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            indexer.index_topk(query_TND, weight_TN, keys, table_BP, *field, 8)
    with pytest.raises(ValueError, match=r"weight is torch.float32 \(2, 5\), must be torch.float32 \[23, 5\]"):
        indexer.index_topk(query_TND, weight_TN[:2], keys, table_BP, request_T, length_T, 8)
    with pytest.raises(ValueError, match="top_k=0: must be at least 1"):
        indexer.index_topk(query_TND, weight_TN, keys, table_BP, request_T, length_T, 0)
