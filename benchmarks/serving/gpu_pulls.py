"""Pulls of KV pages from GPU to GPU, alone and beside the steps of an engine: parts of bench_prefill_decode_gpu."""

import contextlib
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.tools.report import BenchmarkReport
from benchmarks.tools.timing import measure, quantile
from eprt import EngineConfig, EPGroup, SamplingParams
from eprt.engine.engine import Engine
from eprt.fd_desk import FdDesk, FdTicket
from eprt.gpu.driver import api, check
from eprt.gpu.shared_allocation import AddressRange
from eprt.kv.gpu_pages import GpuPages
from eprt.kv.page_runs import page_runs
from eprt.kv.reader import PageReader, PageSource, open_reader

NUM_LAYERS, PAGE_SIZE, WIDTH = 62, 64, 576  # DeepSeek-V3's, and the MTP layer
NUM_PAGES, NUM_PULLED = 256, 64  # of a cache, and of a prompt of 4096 tokens
_SHAPE = NUM_LAYERS, NUM_PAGES, PAGE_SIZE, WIDTH
_PULLED_BYTES = NUM_PULLED * prod(_SHAPE) // NUM_PAGES * 2
ROWS = 32  # requests that decode


def make_pages(gpu: int, value: int) -> GpuPages:
    torch.cuda.set_device(gpu)
    pages = GpuPages(torch.device("cuda", gpu))
    pages.allocate_part(_SHAPE, torch.bfloat16)
    pages.bytes_LPB[0][:] = value
    torch.cuda.synchronize()
    return pages


def _own_pages(ends: Connection, gpu: int) -> None:
    """Another process: has pages until it is told to end."""
    cache = make_pages(gpu, 1)
    ends.send(cache.source)
    ends.recv()


@contextlib.contextmanager
def pages_elsewhere() -> Iterator[PageSource]:
    """Of a process with the last GPU but one, if there are two."""
    here, there = multiprocessing.Pipe()
    gpu = max(torch.cuda.device_count() - 2, 0)
    owner = multiprocessing.get_context("spawn").Process(target=_own_pages, args=(there, gpu), daemon=True)
    owner.start()
    assert here.poll(60), "the other process has no pages after 60 s"
    yield here.recv()
    here.send(None)
    owner.join(30)


def _layouts(rng: random.Random) -> dict[str, tuple[list[int], list[int]]]:
    """From which pages into which: side by side, as of a server that has just begun; in runs of four on both sides; and
    at random, as of one that has run for a while."""
    runs = [4 * start + i for start in rng.sample(range(NUM_PAGES // 4), NUM_PULLED // 4) for i in range(4)]
    one_by_one = rng.sample(range(NUM_PAGES), NUM_PULLED), rng.sample(range(NUM_PAGES), NUM_PULLED)
    return {"in a row": (list(range(64)), list(range(64, 128))), "fours": (runs, list(range(64))), "random": one_by_one}


@contextlib.contextmanager
def _mapped(source: PageSource, gpu: int) -> Iterator[int]:
    """The address of the other side's pages."""
    addresses = AddressRange(gpu, prod(_SHAPE) * 2)
    fd = FdDesk.fetch(FdTicket(source.desk, source.parts[0].fd))
    addresses.map_shared(fd)
    os.close(fd)
    yield addresses.address
    addresses.close()


def _other_ways(
    theirs: int, mine: int, pages: tuple[list[int], list[int]], stream: torch.cuda.Stream
) -> dict[str, Any]:
    """The same bytes by a call for each piece, and, where the driver has that, by one call for all pieces."""
    page_bytes = PAGE_SIZE * WIDTH * 2
    offsets = [layer * NUM_PAGES * page_bytes for layer in range(NUM_LAYERS)]
    sources = [theirs + offset + page * page_bytes for offset in offsets for page in pages[0]]
    targets = [mine + offset + page * page_bytes for offset in offsets for page in pages[1]]
    cu, raw = api(), stream.cuda_stream

    def pieces() -> None:
        for target, source in zip(targets, sources):
            check(cu.cuMemcpyAsync(target, source, page_bytes, raw), "copying")
        stream.synchronize()

    ways: dict[str, Callable[[], None]] = {"pieces": pieces}
    if hasattr(cu, "cuMemcpyBatchAsync"):
        attributes = cu.CUmemcpyAttributes()
        attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        sizes = [page_bytes] * len(targets)

        def batch() -> None:
            where = list(map(cu.CUdeviceptr, targets)), list(map(cu.CUdeviceptr, sources))
            check(cu.cuMemcpyBatchAsync(*where, sizes, len(sizes), [attributes], [0], 1, raw), "copying")
            stream.synchronize()

        ways["batch"] = batch
    return ways


def _pulls(
    cache: GpuPages, reader: PageReader, pages: tuple[list[int], list[int]], host_s: list[float]
) -> dict[str, Any]:
    """A pull, one with checksums, and these alone. host_s: gets the host's time in each of the first."""
    stream = torch.cuda.current_stream()

    def pull() -> None:
        begin_s = time.perf_counter()
        reader.read_pages(pages[0], cache.bytes_LPB, pages[1])
        host_s.append(time.perf_counter() - begin_s)
        stream.synchronize()

    def checked() -> None:
        reader.read_pages(pages[0], cache.bytes_LPB, pages[1])
        cache.checksums(pages[1])

    return {"pull": pull, "checked": checked, "sums": partial(cache.checksums, pages[1])}


def measure_pulls(report: BenchmarkReport, source: PageSource, samples: int) -> None:
    """A prompt's pages against one copy of as many bytes."""
    gpu, rng = torch.cuda.device_count() - 1, random.Random(0)
    cache = make_pages(gpu, 2)
    cache.enter_thread()
    stream = torch.cuda.current_stream()
    with _mapped(source, gpu) as theirs:
        mine = cache.bytes_LPB[0].data_ptr()

        def copy() -> None:
            check(api().cuMemcpyAsync(mine, theirs, _PULLED_BYTES, stream.cuda_stream), "copying")
            stream.synchronize()

        begin_s = time.perf_counter()
        reader = open_reader(source)
        opened_s = time.perf_counter() - begin_s
        for layout, pages in _layouts(rng).items():
            host_s: list[float] = []
            ways = {**_pulls(cache, reader, pages, host_s), "copy": copy}
            try:
                others = _other_ways(theirs, mine, pages, stream)
                for way in others.values():
                    way()
                ways |= others
            except Exception as error:
                print(f"other ways to copy cannot be had: {error!r}")
            times = measure(ways, samples=samples, warmup=2)
            row: dict[str, Any] = {"layout": layout, "mb": _PULLED_BYTES / 1e6, "pieces": NUM_PULLED * NUM_LAYERS}
            row |= {"calls": len(page_runs(*pages)), "host_ms": sorted(host_s)[len(host_s) // 2] * 1e3}
            for name, timing in times.items():
                row |= timing.columns(name, "ms")
            row |= {f"{name}_gb_per_s": _PULLED_BYTES / times[name].median_s / 1e9 for name in ("pull", "sums")}
            row["ratio"] = times["copy"].median_s / times["pull"].median_s
            row["checked_ratio"] = times["copy"].median_s / times["checked"].median_s
            report.add_row(part="pull", **row, open_ms=opened_s * 1e3)
        assert (cache.bytes_LPB[0][:, pages[1]] == 1).all(), "pages have arrived"
        reader.close()
    torch.cuda.set_stream(torch.cuda.default_stream())
    cache.close()


@dataclass
class Puller:
    """Pulls a prompt of 4096 tokens again and again, in a thread, as a decode instance does. pause_s: after each; None:
    it does nothing."""

    source: PageSource
    cache: GpuPages
    pause_s: float | None = None
    num_pulls: int = 0
    _ends: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self):
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.cache.enter_thread()
        reader = open_reader(self.source)
        _, _, pages = _layouts(random.Random(0)).values()
        while not self._ends.is_set():
            if (pause_s := self.pause_s) is None:
                time.sleep(1e-3)
                continue
            reader.read_pages(pages[0], self.cache.bytes_LPB, pages[1])
            self.cache.checksums(pages[1])
            self.num_pulls += 1
            time.sleep(pause_s)
        reader.close()

    def close(self) -> None:
        self._ends.set()
        self._thread.join()


def _decoding_engine(model_dir: Path, num_layers: int, num_tokens: int) -> Engine:
    """With ROWS requests that have computed their prompts."""
    options: dict[str, Any] = {"load_format": "dummy", "num_hidden_layers": num_layers, "spare_experts": 0}
    options |= {"kv_cache_gb": 8.0, "max_num_seqs": ROWS, "low_latency_max_tokens": ROWS, "graph_sizes": (ROWS,)}
    group = EPGroup.single()
    group.gpus = (str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid),)
    engine = Engine(EngineConfig(str(model_dir), device="cuda", chunk_size=8192, max_model_len=8192, **options), group)
    rng = random.Random(0)
    for i in range(ROWS):
        prompt = [rng.randrange(3, 500) for _ in range(1024)]
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        engine.add_request(str(i), prompt, params)
    while engine.stats().num_generated_tokens < 2 * ROWS:
        engine.step()
    return engine


def measure_steps(report: BenchmarkReport, source: PageSource, model_dir: Path, num_layers: int, rounds: int) -> None:
    """Steps of ROWS decodes, alone and while prompts are pulled, in turns."""
    gpu, steps_of_turn = torch.cuda.device_count() - 1, 60
    torch.cuda.set_device(gpu)
    pauses: dict[str, float | None] = {"alone": None, "10 prompts a second": 0.1, "without a pause": 0.0}
    engine = _decoding_engine(model_dir, num_layers, (rounds + 1) * len(pauses) * (steps_of_turn + 10) + 100)
    cache = make_pages(gpu, 2)
    puller = Puller(source, cache)
    seconds: dict[str, list[float]] = {name: [] for name in pauses}
    pulls = dict.fromkeys(pauses, 0)
    for turn in range(rounds + 1):
        for name, pause_s in pauses.items():
            puller.pause_s, before = pause_s, puller.num_pulls
            _step(engine, 10)
            taken = _step(engine, steps_of_turn)
            if turn:  # the first one warms up
                seconds[name] += taken
                pulls[name] += puller.num_pulls - before
    puller.close()
    engine.close()
    cache.close()
    alone = sorted(seconds["alone"])
    for name, taken in seconds.items():
        ordered = sorted(taken)
        row = {f"step_p{percent}_ms": quantile(ordered, percent / 100) * 1e3 for percent in (50, 99)}
        row |= {f"p{p}_ratio": quantile(ordered, p / 100) / quantile(alone, p / 100) for p in (50, 99)}
        report.add_row(part="steps", pulls=name, steps=len(taken), pulled_prompts=pulls[name], **row)


def _step(engine: Engine, num: int) -> Sequence[float]:
    taken = []
    for _ in range(num):
        begin_s = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - begin_s)
    return taken
