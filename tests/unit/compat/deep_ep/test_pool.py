"""The pool of symmetric memory: gaps are found, and come back when nobody refers to them."""

import random
from itertools import pairwise

import pytest

from eprt.compat.deep_ep.pool import MemoryPool, PoolFullError


def test_blocks_never_overlap_and_come_back():
    rng = random.Random(1)
    pool, blocks = MemoryPool(256, 100_000), []
    for _ in range(2000):
        if blocks and rng.random() < 0.5:
            blocks.pop(rng.randrange(len(blocks)))
        try:
            blocks.append(pool.take_block(rng.randint(0, 20_000)))
        except PoolFullError:
            blocks.pop()
        spans = sorted((block.offset, block.offset + block.num_bytes) for block in blocks)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert all(start >= 256 and start % 128 == 0 and end <= 100_256 for start, end in spans)
    blocks.clear()
    assert pool.take_block(99_900).offset == 256


def test_a_full_pool_says_how_full():
    pool = MemoryPool(0, 1024)
    kept = pool.take_block(600)
    with pytest.raises(PoolFullError, match=r"512 B do not fit: 640 of 1024 B are in use, by 1 blocks"):
        pool.take_block(512)
    del kept
    assert pool.take_block(1024).offset == 0


def test_who_gets_memory_again_is_told_what_was_noted_when_it_came_back():
    notes = iter("abcdefgh")
    pool = MemoryPool(0, 1024, mark=lambda: next(notes))
    first, second = pool.take_block(256), pool.take_block(512)
    assert first.marks == second.marks == ()
    del first
    del second
    across = pool.take_block(384)  # all of a's, a quarter of b's
    assert across.marks == ("a", "b")
    rest = pool.take_block(640)
    assert rest.marks == ("b",)
    del across
    assert pool.take_block(384).marks == ("c",)


def test_what_graphs_write_to_goes_to_graphs_alone():
    pool = MemoryPool(0, 1024, mark=lambda: "noted")
    captured = pool.take_block(512, graph=True)
    assert captured.offset == 0
    del captured
    assert not pool.fits(640) and pool.take_block(512).offset == 512
    smaller = pool.take_block(128, graph=True)
    assert (smaller.offset, smaller.num_bytes, smaller.marks) == (0, 512, ())
    elsewhere = pool.take_block(256, graph=True)
    assert elsewhere.offset == 512


def test_a_block_that_shrinks_gives_back_its_end_and_who_gets_that_is_told_of_earlier_users():
    notes = iter("abcdef")
    pool = MemoryPool(0, 1024, mark=lambda: next(notes))
    del_me = pool.take_block(1024)
    del del_me
    block = pool.take_block(1024)
    assert block.marks == ("a",)
    pool.shrink_block(block, 300)
    assert block.num_bytes == 384 and not pool.fits(641)
    end = pool.take_block(640)
    assert (end.offset, end.marks) == (384, ("a",))
    pool.shrink_block(block, 5000)  # never grows
    assert block.num_bytes == 384
    del block
    assert pool.take_block(384).marks == ("b",)
