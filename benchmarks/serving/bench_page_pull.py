"""Pulled KV pages: speed against a plain copy of the same bytes, and damaged pages that are found.

    python -m benchmarks.serving.bench_page_pull

The cache has DeepSeek-V3's width (61 layers and the MTP layer, pages of 64 tokens in bf16); pages lie in it at random,
as in a server that has run for a while. Both sides are in this process; the reader maps the memory as another's. Then
another process has the pages, and each reader in turn gets a prompt's: `memory` maps it, `tcp` and `nixl` take it over
the loopback interface by TCP (NIXL by what UCX_TLS says, where it is set).

    pull_ms      read_pages() of a prompt's pages
    checked_ms   the same, and the checksums of what arrived, as a decode instance does
    copy_ms      numpy's copy of as many bytes, in a row
    ratio        copy_ms / pull_ms
    checked_ratio    copy_ms / checked_ms
    first_ms     of a reader: its first pages, and all that it needs for them
"""

import argparse
import multiprocessing
import os
import random
import sys
import time
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import torch

from benchmarks.tools.report import BenchmarkReport
from benchmarks.tools.timing import measure
from eprt.kv.nixl import load_nixl
from eprt.kv.pages import CachePages
from eprt.kv.reader import FAR_READERS, open_reader

NUM_RANKS = 0

NUM_LAYERS, PAGE_SIZE, WIDTH = 62, 64, 576


def _cache(num_pages: int) -> CachePages:
    pages = CachePages()
    pages.allocate_part((NUM_LAYERS, num_pages, PAGE_SIZE, WIDTH), torch.bfloat16)
    pages.bytes_LPB[0][:] = 1  # taken from the system, as in a cache that has been used
    return pages


def _time(num_tokens: int, samples: int, rng: random.Random) -> dict[str, float]:
    num = -(-num_tokens // PAGE_SIZE)
    theirs, mine = _cache(2 * num), _cache(2 * num)
    reader = open_reader(theirs.source)
    from_pages, to_pages = rng.sample(range(2 * num), num), rng.sample(range(2 * num), num)
    (mine_LPB,) = mine.bytes_LPB
    plain_from, plain_to = (np.ones(num * NUM_LAYERS * PAGE_SIZE * WIDTH * 2, dtype=np.uint8) for _ in range(2))

    def pull() -> None:
        reader.read_pages(from_pages, [mine_LPB], to_pages)

    def checked() -> None:
        pull()
        for page in to_pages:
            mine.checksum(page)

    times = measure(
        {"pull": pull, "checked": checked, "copy": lambda: np.copyto(plain_to, plain_from)}, samples=samples, warmup=1
    )
    row = {"tokens": num_tokens, "mb": plain_from.nbytes / 1e6}
    for name, timing in times.items():
        row |= timing.columns(name, "ms")
    row["pull_gb_per_s"] = plain_from.nbytes / times["pull"].median_s / 1e9
    row["ratio"] = times["copy"].median_s / times["pull"].median_s
    row["checked_ratio"] = times["copy"].median_s / times["checked"].median_s
    reader.close()
    return row


def _own_pages(ends: Connection, reader: str, num_pages: int) -> None:
    """Another process: serves pages until it is told to end."""
    cache = _cache(num_pages)
    cache.open_to_hosts("127.0.0.1", reader)
    ends.send(cache.source)
    ends.recv()


def _time_reader(name: str, num_tokens: int, samples: int, rng: random.Random) -> dict[str, float | str]:
    num = -(-num_tokens // PAGE_SIZE)
    mine, pages = _cache(2 * num), rng.sample(range(2 * num), num)
    here, there = multiprocessing.Pipe()
    far = name if name in FAR_READERS else "tcp"
    owner = multiprocessing.get_context("spawn").Process(target=_own_pages, args=(there, far, 2 * num))
    owner.start()
    source = here.recv()
    if name in FAR_READERS:
        source = msgspec.structs.replace(source, host="another", address=("127.0.0.1", source.address[1]))
    begin_s = time.perf_counter()
    reader = open_reader(source)

    def pull() -> None:
        reader.read_pages(pages, mine.bytes_LPB, pages)

    pull()
    first_s = time.perf_counter() - begin_s
    timing = measure({"pull": pull}, samples=samples, warmup=1)["pull"]
    reader.close()
    here.send(None)
    owner.join()
    num_bytes = num * NUM_LAYERS * PAGE_SIZE * WIDTH * 2
    row = {"reader": name, "tokens": num_tokens, "mb": num_bytes / 1e6, "first_ms": first_s * 1e3}
    return row | timing.columns("pull", "ms") | {"pull_gb_per_s": num_bytes / timing.median_s / 1e9}


def _readers() -> list[str]:
    """Those that can run here."""
    try:
        load_nixl()
    except ValueError as error:
        print(f"no row of nixl: {error}")
        return ["memory", "tcp"]
    return ["memory", "tcp", "nixl"]


def _find_damage(num_pulls: int, rng: random.Random) -> dict[str, int]:
    """One bit of a pulled prompt is flipped, each time another."""
    theirs, mine = _cache(16), _cache(16)
    reader, found = open_reader(theirs.source), 0
    noise = np.random.default_rng(0).integers(0, 256, theirs.bytes_LPB[0].shape, dtype=np.uint8)
    theirs.bytes_LPB[0][:] = noise
    for _ in range(num_pulls):
        pages = rng.sample(range(16), 8)
        checksums = [theirs.checksum(page) for page in pages]
        reader.read_pages(pages, mine.bytes_LPB, pages)
        assert [mine.checksum(page) for page in pages] == checksums, "undamaged pages are accepted"
        layer, page, at = rng.randrange(NUM_LAYERS), rng.choice(pages), rng.randrange(noise.shape[2])
        mine.bytes_LPB[0][layer, page, at] ^= 1 << rng.randrange(8)
        found += [mine.checksum(page) for page in pages] != checksums
    return {"pulls": num_pulls, "found": found}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    rng = random.Random(arguments.seed)
    os.environ.setdefault("UCX_TLS", "tcp")
    report = BenchmarkReport("page_pull", {"layers": NUM_LAYERS, "page_size": PAGE_SIZE, "width": WIDTH})
    for num_tokens in (256, 1024, 4096):
        report.add_row(part="speed", **_time(num_tokens, arguments.samples, rng))
    for name in _readers():
        report.add_row(part="reader", **_time_reader(name, 1024, arguments.samples, rng))
    damage = _find_damage(100, rng)
    report.add_row(part="damage", **damage)
    report.finish()
    return 0 if damage["found"] == damage["pulls"] else 1


if __name__ == "__main__":
    sys.exit(main())
