"""The indexer of sparse attention against the slow oracle: scores, ties, and attention to what is chosen."""

from typing import Any

import torch

from eprt.ops import cuda
from eprt.ops.cuda import choose_eprt, scores_eprt
from eprt.ops.index_format import IndexFormat
from eprt.ops.kv_format import KVFormat
from tests import reference_ops as reference
from tests.gpu.draw import ROUNDING, Draw, cpu, near

FORMATS = (
    (torch.float32, torch.float32),
    (torch.float32, torch.uint8),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.uint8),
)


def choices(draw: Draw, sizes=((64, 16, (3, 60)),)) -> None:
    """Small whole numbers: every score is exact, and many are equal."""
    for heads, size, lengths in sizes:
        for query_dtype, key_dtype in FORMATS:
            if key_dtype == torch.uint8 and size & (size - 1):
                continue
            case = _case(draw, heads, size, lengths, query_dtype, key_dtype)
            for top_k, most_scores in ((8, 1 << 20), (59, 300)):
                got = cuda.index_topk(*case, top_k=top_k, most_scores=most_scores)
                want = reference.index_topk(*[x.cpu() for x in case], top_k=top_k)
                assert torch.equal(got.cpu(), want), (heads, size, query_dtype, key_dtype, top_k)


def equal_scores_and_bad_ones(draw: Draw) -> None:
    query, weight, keys, table, request, length = _case(draw, 4, 16, (40, 300), torch.float32, torch.float32)
    equal = cuda.index_topk(query * 0, weight, keys, table, request, length, 9).cpu()
    q, w, k, on_cpu, its_request, its_length = cpu(query * 0, weight, keys, table, request, length)
    assert torch.equal(equal, reference.index_topk(q, w, k, on_cpu, its_request, its_length, 9))
    slot = int(table[0, 3]) * 4
    keys.view(-1, 16)[slot] = float("nan")
    chosen = cuda.index_topk(query[:5], weight[:5].abs(), keys, table, request[:5], length[:5], 25)
    assert not (chosen == slot).any() and (chosen >= 0).all()


def long_contexts(draw: Draw, length: int = 20000, top_k: int = 2048, rows: int = 4) -> None:
    """Of random scores, the choice is that of the scores as the GPU has them: no fp32 product is the oracle's."""
    size, keys = 128, draw.normal(length // 16 + 1, 16, 128)
    table = torch.randperm(len(keys), generator=torch.Generator().manual_seed(0))[None].int().to(draw.device)
    query, weight = draw.normal(rows, 64, size), draw.normal(rows, 64)
    request = torch.zeros(rows, dtype=torch.int32, device=draw.device)
    seen = torch.arange(length - rows + 1, length + 1, dtype=torch.int32, device=draw.device)
    got = cuda.index_topk(query, weight, keys, table, request, seen, top_k).cpu()
    q, w, k, on_cpu, its_request, its_seen = cpu(query, weight, keys, table, request, seen)
    want = reference.index_topk(q, w, k, on_cpu, its_request, its_seen, top_k)
    for a, b in zip(got.tolist(), want.tolist()):
        assert len(set(a) & set(b)) >= top_k - 2, "but for roundings at the edge"


def keys(draw: Draw) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        entry = IndexFormat(128, dtype)
        pages = torch.zeros(5, 4, entry.width, dtype=dtype, device=draw.device)
        key, slots = draw.normal(3, 128), torch.tensor([7, 0, 19], device=draw.device)
        cuda.index_insert(pages, slots, key)
        flat = pages.view(-1, entry.width).cpu()
        assert torch.equal(flat[[7, 0, 19]], entry.encode(key.cpu())) and not flat[[1, 6, 18]].any()


def attention_to_chosen_tokens(draw: Draw) -> None:
    for dtype, fp8 in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        T, N, nope, rope, value, latent = 5, 4, 16, 8, 16, 32
        entry = KVFormat(latent, rope, torch.uint8 if fp8 else dtype)
        pages = entry.encode(draw.normal(40, latent + rope, dtype=dtype).cpu()).view(10, 4, -1).to(draw.device)
        q_nope, q_rope = draw.normal(T, N, nope, dtype=dtype), draw.normal(T, N, rope, dtype=dtype)
        w, rotation = draw.normal(N * (nope + value), latent, dtype=dtype), draw.rotation(rope, T, True)
        generator = torch.Generator().manual_seed(0)
        slots = torch.stack([torch.randperm(40, generator=generator)[:20].sort().values for _ in range(T)])
        slots, length = slots.int().to(draw.device), torch.tensor([20, 3, 20, 1, 17], dtype=torch.int32)
        got = cuda.mla_chosen(q_nope, q_rope, pages, slots, length.to(draw.device), w, 0.2, rotation).cpu()
        turned = cuda.rope(q_rope, rotation).cpu()
        for t, seen in enumerate(length.tolist()):
            chosen = pages.cpu().view(-1, 1, pages.shape[2])[slots[t, :seen].long().cpu()]
            context = reference.PagedContext(chosen, torch.arange(seen)[None], torch.tensor([seen]))
            want = reference.mla_decode(q_nope[t : t + 1].cpu(), turned[t : t + 1], context, w.cpu(), 0.2)
            near(got[t], want[0], 4 * ROUNDING[dtype], f"chosen tokens {dtype} {fp8}")


def _case(draw: Draw, heads: int, size: int, lengths, query_dtype: torch.dtype, key_dtype: torch.dtype) -> Any:
    """Of each request the last queries, up to four, in pages of four tokens."""
    generator = torch.Generator().manual_seed(heads)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    num_pages = sum(-(-length // 4) for length in lengths)
    order, tables, at = torch.randperm(num_pages, generator=generator).int(), [], 0
    for length in lengths:
        tables.append(order[at : (at := at + -(-length // 4))])
    table_BP = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=-1)
    pages = IndexFormat(size, key_dtype).encode(whole(num_pages * 4, size)).view(num_pages, 4, -1)
    rows = [(b, seen) for b, length in enumerate(lengths) for seen in range(max(1, length - 3), length + 1)]
    request_T, length_T = torch.tensor(rows, dtype=torch.int32).T.contiguous()
    case = whole(len(rows), heads, size).to(query_dtype), whole(len(rows), heads), pages, table_BP, request_T, length_T
    return tuple(x.to(draw.device) for x in case)


def _scores(draw: Draw, length: int, kind: int) -> torch.Tensor:
    score = draw.normal(length)
    if kind == 1:  # the best lie together
        score[length // 3 : length // 2] += 50
    elif kind == 2:  # many are equal
        score = score.mul_(2).round_()
    elif kind == 3:
        score[::7], score[3::11], score[5::13] = torch.nan, -0.0, torch.inf
    elif kind == 4:
        score = 1 + score * 1e-6
    elif kind == 5:
        score.zero_()
    return score


CHOICES = ((1, 131072), (3, 131072), (16, 131072), (64, 131072), (200, 40000), (9, 1 << 20))


def choices_by_their_own_kernel(draw: Draw, shapes=CHOICES, tops=(2048, 33, 8192)) -> None:
    """Every number of thread blocks for a row, every kind of scores; NaN and infinity behind the scores."""
    if torch.cuda.get_device_capability() != (9, 0):
        return
    lengths = [0, 1, 2047, 2048, 2049, 5000, 8192, 8193, 30000, 131072]
    for rows, longest in shapes:
        page, width = 64, -(-longest // 64) + (longest < 1 << 20)
        score_XS = torch.full((rows, width * page), torch.inf, device=draw.device)
        score_XS[:, ::3] = torch.nan
        table = torch.stack([torch.randperm(width, generator=draw.generator) for _ in range(5)]).int().to(draw.device)
        request = (torch.arange(rows, dtype=torch.int32) * 3 % 5).to(draw.device)
        seen = [longest if x % 3 == 0 else min(longest, lengths[(x + rows) % len(lengths)]) for x in range(rows)]
        for x, length in enumerate(seen):
            score_XS[x, :length] = _scores(draw, length, (x + rows // 2) % 6)
        length_X = torch.tensor(seen, dtype=torch.int32, device=draw.device)
        for top_k in tops:
            got = torch.full((rows, top_k), -9, dtype=torch.int32, device=draw.device)
            choose_eprt.choose(got, score_XS, table, request, length_X, page)
            for x, length in enumerate(seen):
                score = score_XS[x, :length]
                score = torch.where(score.isnan(), -torch.inf, score) + 0.0
                best = score.sort(descending=True, stable=True).indices[:top_k].sort().values
                want = torch.full((top_k,), -1, dtype=torch.int32, device=draw.device)
                want[: len(best)] = table[x * 3 % 5][best // page] * page + best.int() % page
                assert torch.equal(got[x], want), (rows, longest, top_k, x, length)


_DECODES = [(b, 700 + 5000 * b - t) for b in range(5) for t in (2, 1, 0)]
_PROMPT = [(0, seen) for seen in range(3000, 3301)] + [(1, 0), *((2, seen) for seen in range(1, 90))]
# Positions of a page, and the request and length of each row.
SCORES = ((64, _DECODES), (16, _DECODES), (64, _PROMPT), (32, _PROMPT), (256, [(3, 131072)]))


def scores_by_their_own_kernel(draw: Draw, batches=SCORES) -> None:
    """Of an fp8 cache with NaN where nobody wrote, of decodes and prompts, against float64 on the rounded queries."""
    if torch.cuda.get_device_capability() != (9, 0):
        return
    entry = IndexFormat(128, torch.uint8)
    for page, rows in batches:
        request_X, length_X = torch.tensor(rows, dtype=torch.int32).T.contiguous().to(draw.device)
        width = -(-max(length for _, length in rows) // page)
        table = torch.randperm(5 * width, generator=draw.generator).int().view(5, width).to(draw.device)
        keys = entry.encode(draw.normal(5 * width * page, 128)).view(5 * width, page, -1)
        plain = entry.decode(keys)
        for b in range(5):
            seen = max([0, *(length for request, length in rows if request == b)])
            unused = torch.arange(seen, width * page, device=draw.device)
            keys[table[b].long()[unused // page], unused % page] = 0x7F
        query, weight = draw.normal(len(rows), 64, 128, dtype=torch.bfloat16), draw.normal(len(rows), 64)
        score_XS = torch.full((len(rows), width * page), 99.0, device=draw.device)
        scores_eprt.score(score_XS, query, weight, keys, table, request_X, length_X)
        rounded, scaled = scores_eprt.quantize(query, weight)
        rounded = rounded.view(torch.float8_e4m3fn).double()
        near((rounded * (scaled / weight)[..., None]).flatten(1), query.flatten(1), 0.04, "queries in e4m3")
        for x in range(0, len(rows), 7):
            (b, length), at = rows[x], torch.arange(rows[x][1], device=draw.device)
            key = plain[table[b].long()[at // page], at % page].double()
            want = ((rounded[x] @ key.T).relu() * scaled[x].double()[:, None]).sum(0)
            near(score_XS[x, :length], want, 2e-3, f"scores {page} {x} {length}")
            assert (score_XS[x, length:] == 99).all()


def recorded_choices(draw: Draw) -> None:
    """Lengths change after the recording."""
    if torch.cuda.get_device_capability() != (9, 0):
        return
    keys, query, weight = draw.normal(700, 64, 128), draw.normal(4, 64, 128), draw.normal(4, 64)
    table = torch.arange(700, dtype=torch.int32, device=draw.device)[None].repeat(4, 1)
    request, graph = torch.arange(4, dtype=torch.int32, device=draw.device), torch.cuda.CUDAGraph()
    length = torch.full((4,), 44800, dtype=torch.int32, device=draw.device)
    cuda.index_topk(query, weight, keys, table, request, length, 2048)
    with torch.cuda.graph(graph):
        slots = cuda.index_topk(query, weight, keys, table, request, length, 2048)
    for each in ([44800, 1, 0, 2049], [2048, 30000, 9000, 5]):
        length.copy_(torch.tensor(each, dtype=torch.int32))
        graph.replay()
        assert torch.equal(slots, cuda.index_topk(query, weight, keys, table, request, length, 2048)), each


SMALL = (choices, equal_scores_and_bad_ones, keys, attention_to_chosen_tokens)
ALL = (*SMALL, long_contexts, choices_by_their_own_kernel, scores_by_their_own_kernel, recorded_choices)
