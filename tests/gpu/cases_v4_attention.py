"""DeepSeek-V4's attention and its indexer on GPUs against the CPU's operators, NaN in all memory that nobody sees."""

from dataclasses import replace

import torch
from torch import Tensor

from eprt import ops
from eprt.ops import cuda
from eprt.ops.elementwise import Rotation
from eprt.ops.entry_format import EntryFormat
from eprt.ops.index_format import IndexFormat
from eprt.ops.shared_attention import SeenEntries, SeenRing, SeenTokens
from tests import reference_ops as reference
from tests.gpu.draw import ROUNDING, Draw, near

FP8 = torch.uint8
# Of queries and of what they see.
DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, FP8),
    (torch.float32, FP8),
)
# Queries, heads, values of a key, of them rotated, entries of a page.
SMALL_SHAPES = ((7, 4, 32, 8, 4), (3, 20, 76, 4, 1), (2, 5, 128, 64, 2))
LARGE_SHAPES = ((9, 64, 512, 64, 64), (3, 128, 512, 64, 2), (300, 64, 512, 64, 64))


class Seen:
    """Random queries, each of which sees a window of its request's ring and entries, some none of either."""

    def __init__(self, draw: Draw, shape, dtypes, window: int = 20, most: int = 30, top_k: int = 11):
        T, N, D, turning, page_entries = shape
        dtype, stored = dtypes
        self.entry, generator = EntryFormat(D, turning, stored), draw.generator
        requests, width = T // 3 + 1, -(-most // page_entries)
        self.query, self.sink = draw.normal(T, N, D, dtype=dtype), draw.normal(N)
        request = torch.randint(0, requests, (T,), generator=generator).sort().values.int()
        num = torch.randint(0, most + 1, (T,), generator=generator).int()
        num[0], num[-1] = 0, most
        ring = window + 3
        end = torch.randint(0, 200, (T,), generator=generator)
        begin = (end - torch.randint(0, window + 1, (T,), generator=generator)).clamp(min=0)
        begin[-1] = end[-1] = 5
        self.begin, self.end = begin, end
        pages = self._unseen(requests * width, page_entries)
        table = torch.randperm(requests * width, generator=generator).view(requests, width)
        for t in range(T):
            at = torch.arange(int(num[t]))
            self._fill(pages, table[int(request[t])][at // page_entries], at % page_entries)
        rings = self._unseen(T, ring)
        local, of_local = [torch.empty(0, self.entry.width, dtype=rings.dtype)], []
        for t in range(T):
            position = torch.arange(int(begin[t]), int(end[t]))
            self._fill(rings, torch.full_like(position, t), position % ring)
            first = sum(map(len, local))
            of_local.append((first + 1, first + 1 + len(position)))
            local += [self._unseen(1, 1)[0], rings[t, position % ring]]
        slots = torch.full((T, top_k), -1, dtype=torch.int32)
        for t in range(T):
            chosen = torch.randperm(int(num[t]), generator=generator)[:top_k].sort().values
            slots[t, : len(chosen)] = table[request[t]][chosen // page_entries] * page_entries + chosen % page_entries
        bounds = torch.tensor(of_local)
        local_XD = torch.cat(local)
        if stored != FP8:
            local_XD = local_XD.to(dtype)
        self.tokens = SeenTokens(local_XD, bounds[:, 0], bounds[:, 1])
        self.ring = SeenRing(rings, torch.arange(T), begin, end)
        self.all = SeenEntries(pages, table, request, num)
        self.chosen = replace(self.all, num_T=num.clamp(max=top_k), slot_TK=slots)
        self.rotation, self.device = draw.rotation(turning, T, True), draw.device

    def _unseen(self, pages: int, rows: int) -> Tensor:
        """Pages that lie apart."""
        width = rows * self.entry.width
        memory = torch.full((pages, width + 32), 0x7F if self.entry.is_fp8 else torch.nan, dtype=self.entry.dtype)
        return memory[:, 16 : 16 + width].unflatten(1, (rows, self.entry.width))

    def _fill(self, pages: Tensor, page: Tensor, place: Tensor) -> None:
        values = torch.randn(len(page), self.entry.size, generator=torch.Generator().manual_seed(len(page)))
        pages[page, place] = self.entry.encode(values)

    def on(self, seen):
        """What is seen, on the device. Pages lie apart there, too."""
        moved = {name: _moved(value, self.device) for name, value in vars(seen).items() if value is not None}
        return replace(seen, **moved)


def _moved(x: Tensor, device: str) -> Tensor:
    if x.dim() != 3 or x.is_contiguous():
        return x.to(device)
    base = torch.empty(x.shape[0], x.stride(0), dtype=x.dtype, device=device)
    there = base[:, : x.shape[1] * x.shape[2]].unflatten(1, x.shape[1:])
    there.copy_(x)
    return there


def attended(draw: Draw, shape, dtypes, splits, of_ring: bool, are_chosen: bool) -> None:
    seen, rope = Seen(draw, shape, dtypes), shape[3]
    entries = seen.chosen if are_chosen else seen.all
    want = ops.shared_attention(seen.query.cpu(), seen.tokens, entries, seen.sink.cpu(), 0.3, rope)
    tokens = seen.ring if of_ring else seen.tokens
    for num in splits:
        got = cuda.shared_attention(seen.query, seen.on(tokens), seen.on(entries), seen.sink, 0.3, rope, num)
        what = f"{shape} {dtypes} ring {of_ring} chosen {are_chosen} splits {num}"
        near(got, want, 2 * ROUNDING[dtypes[0]], what)


def small_attention(draw: Draw) -> None:
    """All ways in the interpreter; each once with each dtype on a GPU, where every one is compiled."""
    ways = [(ring, chosen) for ring in (False, True) for chosen in (False, True)]
    for i, shape in enumerate(SMALL_SHAPES):
        for j, dtypes in enumerate(DTYPES):
            for k, way in enumerate(ways):
                if draw.device == "cpu":
                    attended(draw, shape, dtypes, (None, 1, 3), *way)
                elif (i + j + k) % 4 == 0:
                    attended(draw, shape, dtypes, (1, 3) if i == 0 else (3,), *way)


def large_attention(draw: Draw) -> None:
    """Decodes, whose tokens are in rings, and a prompt, of which each query sees entries chosen for it or all."""
    for shape, splits in zip(LARGE_SHAPES, ((None, 1, 3), (None,), (None,))):
        for dtypes, of_ring in ((DTYPES[1], True), (DTYPES[3], shape is not LARGE_SHAPES[1])):
            attended(draw, shape, dtypes, splits, of_ring, are_chosen=shape is not LARGE_SHAPES[1])
    attended(draw, LARGE_SHAPES[2], DTYPES[1], (None,), of_ring=False, are_chosen=False)


def large_accurate_attention(draw: Draw) -> None:
    attended(draw, LARGE_SHAPES[0], DTYPES[0], (None, 1), of_ring=True, are_chosen=True)
    attended(draw, LARGE_SHAPES[0], DTYPES[4], (None,), of_ring=False, are_chosen=False)


def attention_turned_back(
    draw: Draw,
    of=(
        ((3, 4, 32, 8, 4), DTYPES[0], torch.float32),
        ((2, 20, 76, 4, 1), DTYPES[3], torch.bfloat16),
    ),
) -> None:
    """The bytes of both operators one after the other."""
    for shape, dtypes, dtype in of:
        seen = Seen(draw, shape, dtypes)
        how = seen.query, seen.on(seen.ring), seen.on(seen.chosen), seen.sink, 0.3
        for num in (1, 2):
            apart = cuda.shared_attention(*how, seen.entry.rope_size, num)
            apart = cuda.turn_rows(apart, seen.rotation, backwards=True, dtype=dtype)
            got = cuda.turned_attention(*how, seen.rotation, dtype, num)
            assert torch.equal(got, apart), (shape, dtypes, dtype, num)
        on_cpu = seen.query.cpu(), seen.tokens, seen.chosen, seen.sink.cpu(), 0.3
        turned = Rotation(seen.rotation.cos_sin_PR.cpu(), seen.rotation.position_T.cpu(), True)
        want = ops.turned_attention(*on_cpu, turned, dtype)
        near(got, want, 2 * max(ROUNDING[dtypes[0]], ROUNDING[dtype]), f"turned {shape} {dtypes} {dtype}")


def large_attention_turned_back(draw: Draw) -> None:
    attention_turned_back(draw, (((3, 64, 512, 64, 2), DTYPES[3], torch.bfloat16),))


def refused_formats(draw: Draw) -> None:
    """fp8 entries whose scales the kernel could not load as one word are refused by name."""
    for shape, why in (((2, 4, 70, 6, 1), "multiple of 8 bytes"), ((2, 4, 136, 72, 1), "one group of 64")):
        seen = Seen(draw, shape, DTYPES[3])
        try:
            cuda.shared_attention(seen.query, seen.on(seen.ring), seen.on(seen.all), seen.sink, 0.3, shape[3])
        except ValueError as error:
            assert why in " ".join(str(error).split()) and "--kv-cache-dtype" in str(error)
        else:
            raise AssertionError(f"{shape} was not refused")


def nothing_to_attend(draw: Draw) -> None:
    """No queries; queries that see nothing but the sink; layers without entries."""
    seen = Seen(draw, (4, 5, 32, 8, 4), (torch.float32, torch.float32))
    none, sink = torch.zeros_like(seen.begin), seen.sink
    for num in (1, 2):
        blind = seen.on(replace(seen.tokens, begin_T=none, end_T=none)), seen.on(replace(seen.all, num_T=none.int()))
        assert not cuda.shared_attention(seen.query, *blind, sink_N=sink, scale=0.3, num_splits=num).any()
    no_pages = seen.all.pages_PED.new_empty(0, 1, 32)
    windows = seen.tokens, replace(seen.all, pages_PED=no_pages, num_T=none.int())
    want = ops.shared_attention(seen.query.cpu(), *windows, sink_N=sink.cpu(), scale=0.3)
    near(cuda.shared_attention(seen.query, *map(seen.on, windows), sink_N=sink, scale=0.3), want, 4e-6, "windows alone")
    few = (
        replace(seen.tokens, begin_T=none[:0], end_T=none[:0]),
        replace(seen.all, request_T=none[:0].int(), num_T=none[:0].int()),
    )
    assert cuda.shared_attention(seen.query[:0], *map(seen.on, few), sink_N=sink, scale=0.3).shape == (0, 5, 32)


def chosen_entries(draw: Draw) -> None:
    """V4's keys lie in pages apart, in every format. Small whole numbers: scores are exact, and many are equal."""
    formats = (
        (torch.bfloat16, torch.bfloat16, False),
        (torch.bfloat16, FP8, False),
        (torch.bfloat16, FP8, True),
        (torch.float32, torch.float32, False),
        (torch.float32, FP8, True),
    )
    everywhere = draw.device == "cpu"  # in the interpreter nothing is compiled
    for size, heads, page in ((128, 64, 64), (32, 3, 4), (16, 64, 64))[: 3 if everywhere else 2]:
        for query_dtype, stored, fp4 in formats if everywhere else formats[:3] if size == 128 else formats[3:]:
            index, generator = IndexFormat(size, stored, fp4), draw.generator
            lengths, width = (3, 60, 150), -(-150 // page)
            memory = torch.full((3 * width, page * index.width + 64), 0x7F if stored == FP8 else torch.nan)
            memory = memory.to(stored)
            pages = memory[:, 16 : 16 + page * index.width].unflatten(1, (page, index.width))
            table = torch.randperm(3 * width, generator=generator).view(3, width)
            for b, length in enumerate(lengths):
                keys, at = torch.randint(-2, 3, (length, size), generator=generator).float(), torch.arange(length)
                pages[table[b][at // page], at % page] = index.encode(keys)
            rows = [(b, seen) for b, length in enumerate(lengths) for seen in (0, length - 1, length)]
            request, length = torch.tensor(rows, dtype=torch.int32).T.contiguous()
            query = torch.randint(-2, 3, (len(rows), heads, size), generator=generator).to(query_dtype)
            weight = torch.randint(-2, 3, (len(rows), heads), generator=generator).float()
            on_gpu = query.to(draw.device), weight.to(draw.device)
            pages_on_gpu = _moved(pages, draw.device)
            where = table.to(draw.device), request.to(draw.device), length.to(draw.device)
            for top_k, most_scores in ((40, 1 << 20), (7, 400)):
                limits = {"top_k": top_k, "most_scores": most_scores}
                got = cuda.index_topk(*on_gpu, pages_on_gpu, *where, **limits)
                want = ops.index_topk(query, weight, pages, table, request, length, top_k)
                assert torch.equal(got.cpu(), want), (size, query_dtype, index, top_k)
                plain = index.decode(pages.nan_to_num() if stored != FP8 else pages)
                oracle = query.float(), weight, plain, table, request, length
                assert torch.equal(want, reference.index_topk(*oracle, top_k)), (size, query_dtype, index, top_k)


def recorded_attention(draw: Draw) -> None:
    """Lengths and what is written change after the recording."""
    if draw.device == "cpu":
        return
    seen = Seen(draw, (6, 64, 512, 64, 64), (torch.bfloat16, FP8), window=128, most=400, top_k=512)
    entries = replace(seen.all, request_T=torch.full((6,), int(seen.all.request_T[-1])).int())  # which has 400
    args = seen.query, seen.on(seen.ring), seen.on(entries), seen.sink, 0.05
    slot = torch.arange(6, device=draw.device)
    rows, pages = draw.normal(6, 512, dtype=torch.bfloat16), args[1].pages_PSD

    def step() -> Tensor:
        cuda.insert_rows(pages, slot, rows, seen.entry, seen.rotation)
        return cuda.turned_attention(*args, seen.rotation, torch.bfloat16)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for num in ([0, 1, 2, 100, 399, 400], [400, 0, 0, 3, 64, 65]):
        args[2].num_T.copy_(torch.tensor(num, dtype=torch.int32))
        slot.copy_(torch.tensor([3, -1, 140, -7, 131 * 5, 2]))
        graph.replay()
        assert out.isfinite().all() and torch.equal(out, step()), num


SMALL = (small_attention, attention_turned_back, nothing_to_attend, refused_formats, chosen_entries)
ALL = (*SMALL, large_attention, large_accurate_attention, large_attention_turned_back, recorded_attention)
