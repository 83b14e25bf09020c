"""DeepSeek-V4's operators of attention, cache and streams on one GPU, beside the bytes that they must move.

Calls of one graph work on different data, so keys, states and weights come from memory. floor_us: what must be read and
written once, over the measured bandwidth; to_floor: how many times that an operator takes. Attention has a window of
128 tokens in rings and its output turned back; of a ratio of 4 it reads 512 entries that an indexer chose, of 128 all
of them. Rows of up to 128 are decodes, more are a prompt.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.graph_timer import bandwidth, gpu_times_in_turns, gpu_word
from benchmarks.tools.report import BenchmarkReport
from eprt import EPGroup
from eprt.gpu.device import take_device
from eprt.ops import cuda
from eprt.ops.elementwise import Rotation
from eprt.ops.entry_format import EntryFormat
from eprt.ops.index_format import IndexFormat
from eprt.ops.shared_attention import SeenEntries, SeenRing
from eprt.ops.streams import StreamProjection
from eprt.ops.turned_rows import RowNorm

NUM_RANKS = 0
NEEDS_GPU = True

HEADS, SIZE, TURNING, WINDOW, TOP_K, RATIO = 64, 512, 64, 128, 512, 128
STREAMS, HIDDEN = 4, 7168
ROWS = (1, 16, 64)
PROMPT = 4096
CONTEXTS = (8192, 131072)  # tokens, of which a layer of ratio 128 has an entry each
COPIES = 8  # of the data, in one graph

Call = tuple[str, int, list[Callable[[], object]], int]  # what, rows, calls, bytes of each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operators whose names begin so")
    arguments = parser.parse_args()
    take_device("cuda", EPGroup.single())
    torch.manual_seed(0)
    hbm = bandwidth()
    config = {"device": torch.cuda.get_device_name(), "gpus": 1, "hbm_GBps": round(hbm / 1e9)}
    report = BenchmarkReport(f"v4_ops_{gpu_word()}", config | {"torch": torch.__version__})
    with torch.inference_mode():
        for what, rows, calls, moved in operators():
            if what.startswith(arguments.only):
                time = gpu_times_in_turns({"eprt": calls}, samples=9)["eprt"]
                floor = moved / hbm
                columns = time.columns("eprt") | {"floor_us": floor * 1e6, "to_floor": time.median_s / floor}
                report.add_row(what=what, rows=rows, **columns)
    report.finish()


def operators() -> Iterator[Call]:
    """Each with its data, which is freed when the next one is asked for."""
    for rows in (*ROWS, PROMPT):
        for is_fp8 in (False, True):
            word = "fp8" if is_fp8 else "bf16"
            yield f"attention, {TOP_K} of ratio 4, {word}", rows, *attention(rows, is_fp8, None)
            for context in CONTEXTS if rows < PROMPT else CONTEXTS[:1]:
                yield f"attention, ratio {RATIO} of {context}, {word}", rows, *attention(rows, is_fp8, context)
        yield "mix streams", rows, *mix_streams(rows)
        yield "expand streams", rows, *expand_streams(rows)
        yield "turn queries", rows, *turned_rows(rows)
        for ratio in (4, RATIO):
            yield f"pool entries of ratio {ratio}", rows, *pooling(rows, ratio)
        yield "norm, turn and insert entries", rows, *inserted(rows, EntryFormat(SIZE, TURNING, torch.uint8))
        yield "norm, turn and insert keys in fp4", rows, *inserted(rows, IndexFormat(128, torch.uint8, True))


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def _rotation(rows: int) -> Rotation:
    return Rotation(_normal(4096, TURNING, dtype=torch.float32), torch.randint(4096, (rows,), device="cuda"), True)


def _stored(pages: int, entries: int, entry: EntryFormat) -> Tensor:
    values = torch.randn(entries, SIZE, device="cuda", dtype=torch.bfloat16)
    one = entry.encode(values)
    return one.expand(pages, *one.shape).contiguous()


def attention(rows: int, is_fp8: bool, context: int | None) -> tuple[list[Callable[[], object]], int]:
    """context: None for chosen entries. A prompt's queries share one request's memory."""
    is_prompt = rows > 128
    entry = EntryFormat(SIZE, TURNING, torch.uint8 if is_fp8 else torch.bfloat16)
    requests, copies = (1, 2) if is_prompt else (rows, COPIES)
    num = TOP_K if context is None else context // RATIO
    of_page = 64 if context is None else 2
    pages = 256 if context is None else -(-num // of_page)
    query, sink, rotation = _normal(rows, HEADS, SIZE), _normal(HEADS, dtype=torch.float32), _rotation(rows)
    request = torch.arange(rows, device="cuda").int() % requests
    calls: list[Callable[[], object]] = []
    for _ in range(copies):
        begin = torch.zeros(rows, device="cuda", dtype=torch.int64)
        ring = SeenRing(_stored(requests, WINDOW, entry), request.long(), begin, begin + WINDOW)
        stored = _stored(requests * pages, of_page, entry)
        table = torch.randperm(requests * pages, device="cuda").view(requests, pages)
        slots = None
        if context is None:
            place = torch.rand(rows, pages * of_page, device="cuda").topk(TOP_K).indices.sort().values
            slots = (table[request.long()[:, None], place // of_page] * of_page + place % of_page).int()
        entries = SeenEntries(stored, table, request, torch.full((rows,), num, device="cuda").int(), slots)
        calls.append(partial(cuda.turned_attention, query, ring, entries, sink, 0.05, rotation, torch.bfloat16))
    bytes_of_key = entry.width * entry.dtype.itemsize
    seen = WINDOW + min(num * (1 if context else rows), pages * of_page) if is_prompt else rows * (WINDOW + num)
    return calls, seen * bytes_of_key + 2 * query.nbytes


def mix_streams(rows: int) -> tuple[list[Callable[[], object]], int]:
    outputs, width = STREAMS * (2 + STREAMS), STREAMS * HIDDEN
    fp32 = partial(_normal, dtype=torch.float32)
    calls: list[Callable[[], object]] = []
    for _ in range(2 if rows > 128 else 40):  # whose projections do not stay in the L2 cache
        projection = StreamProjection(fp32(outputs, width), fp32(outputs), fp32(3), 1e-6, 1e-6, 20)
        calls.append(partial(cuda.mix_streams, _normal(rows, STREAMS, HIDDEN), projection))
    return calls, 4 * outputs * width + rows * HIDDEN * (2 * STREAMS + 2 + 4 * STREAMS)


def expand_streams(rows: int) -> tuple[list[Callable[[], object]], int]:
    mixed, post = _normal(rows, STREAMS, HIDDEN, dtype=torch.float32), _normal(rows, STREAMS, dtype=torch.float32)
    y = _normal(rows, HIDDEN)
    return [partial(cuda.expand_streams, mixed, post, y)] * COPIES, mixed.nbytes * 3 // 2 + y.nbytes


def turned_rows(rows: int) -> tuple[list[Callable[[], object]], int]:
    query = _normal(rows, HEADS, SIZE)
    return [partial(cuda.turn_rows, query, _rotation(rows), RowNorm(1e-6))] * COPIES, 2 * query.nbytes


def pooling(rows: int, ratio: int) -> tuple[list[Callable[[], object]], int]:
    """An entry of each request's ring; of a prompt, all those of its rows."""
    overlaps, is_prompt = ratio == 4, rows > 128
    slots = 2 * ratio if overlaps else ratio
    channels = SIZE * (1 + overlaps)
    entries, shape = (rows // ratio, (rows,)) if is_prompt else (rows, (rows, slots))
    states = [_normal(*shape, 2, channels, dtype=torch.float32) for _ in range(2 if is_prompt else COPIES)]
    first = torch.arange(entries, device="cuda") * (ratio if is_prompt else slots)
    index = first[:, None] + torch.arange(slots, device="cuda") - (ratio if is_prompt and overlaps else 0)
    index = index.clamp(min=-1)
    calls = [partial(cuda.pool_entries, state, index, SIZE, ratio if overlaps else 0) for state in states]
    return calls, states[0].nbytes // (1 if is_prompt or not overlaps else 2) + 4 * entries * SIZE


def inserted(rows: int, how: EntryFormat | IndexFormat) -> tuple[list[Callable[[], object]], int]:
    x, pages = _normal(rows, how.size, dtype=torch.float32), torch.zeros(rows, 64, how.width, device="cuda").byte()
    slots, norm = torch.randperm(rows * 64, device="cuda")[:rows], RowNorm(1e-6, _normal(how.size))
    insert = cuda.insert_rows if isinstance(how, EntryFormat) else cuda.insert_keys
    return [partial(insert, pages, slots, x, how, _rotation(rows), norm)] * COPIES, x.nbytes + rows * how.width


if __name__ == "__main__":
    main()
