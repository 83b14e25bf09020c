"""The pool of symmetric memory: gaps are found, and come back when nobody refers to them."""

import random
from itertools import pairwise

import pytest

from eprt.gpu.pool import Pool, PoolFullError


def test_blocks_never_overlap_and_come_back():
    rng = random.Random(1)
    pool, blocks = Pool(256, 100_000), []
    for _ in range(2000):
        if blocks and rng.random() < 0.5:
            blocks.pop(rng.randrange(len(blocks)))
        try:
            blocks.append(pool.take(rng.randint(0, 20_000)))
        except PoolFullError:
            blocks.pop()
        spans = sorted((block.offset, block.offset + block.num_bytes) for block in blocks)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert all(start >= 256 and start % 128 == 0 and end <= 100_256 for start, end in spans)
    blocks.clear()
    assert pool.take(99_900).offset == 256


def test_a_full_pool_says_how_full():
    pool = Pool(0, 1024)
    kept = pool.take(600)
    with pytest.raises(PoolFullError, match=r"512 B do not fit: 640 of 1024 B are in use, by 1 blocks"):
        pool.take(512)
    del kept
    assert pool.take(1024).offset == 0


def test_who_gets_memory_again_is_told_what_was_noted_when_it_came_back():
    notes = iter("abcdefgh")
    pool = Pool(0, 1024, mark=lambda: next(notes))
    first, second = pool.take(256), pool.take(512)
    assert first.marks == second.marks == ()
    del first
    del second
    across = pool.take(384)  # all of a's, a quarter of b's
    assert across.marks == ("a", "b")
    rest = pool.take(640)
    assert rest.marks == ("b",)
    del across
    assert pool.take(384).marks == ("c",)


def test_what_graphs_write_to_goes_to_graphs_alone():
    pool = Pool(0, 1024, mark=lambda: "noted")
    captured = pool.take(512, graph=True)
    assert captured.offset == 0
    del captured
    assert not pool.fits(640) and pool.take(512).offset == 512
    smaller = pool.take(128, graph=True)
    assert (smaller.offset, smaller.num_bytes, smaller.marks) == (0, 512, ())
    elsewhere = pool.take(256, graph=True)
    assert elsewhere.offset == 512
