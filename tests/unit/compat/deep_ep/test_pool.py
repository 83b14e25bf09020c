"""The pool of symmetric memory: gaps are found, and come back when nobody refers to them."""

import random
from itertools import pairwise

import pytest
import torch

from eprt.compat.deep_ep.pool import MemoryPool, PoolFullError
from eprt.compat.deep_ep.stream_pool import StreamPool


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


class FakeStreams:
    """Of torch: streams by number, the current one, and who waited for what."""

    def __init__(self, monkeypatch):
        self.waits: list[tuple[int, object]] = []
        self.events: list[int] = []
        self.current, streams = 1, self

        class Stream:
            def __init__(self, raw: int):
                self.cuda_stream = raw

            def __eq__(self, other):
                return self.cuda_stream == other.cuda_stream

            def wait_event(self, event):
                streams.waits.append((self.cuda_stream, event.of))

            def wait_stream(self, other):
                streams.waits.append((self.cuda_stream, f"all of {other.cuda_stream}"))

        class Event:
            def record(self, stream):
                self.of = stream.cuda_stream
                streams.events.append(self.of)

        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(self.current))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: self.current, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: self.captures, raising=False)
        self.captures = False


def test_one_stream_alone_records_no_events_and_a_second_waits_for_all_it_has_done(monkeypatch):
    streams = FakeStreams(monkeypatch)
    pool = StreamPool(0, 1024)
    for _ in range(3):
        pool.take_block(1024)  # and lets it go
    assert streams.events == streams.waits == []
    streams.current = 2
    block = pool.take_block(1024)
    assert streams.waits == [(2, "all of 1")]
    del block
    assert streams.events == [2]
    streams.current = 1
    pool.take_block(1024)
    assert streams.waits[1:] == [(1, 2)] and streams.events == [2, 1]
    pool.take_block(1024)
    assert streams.waits[1:] == [(1, 2)], "its own work it need not wait for"


def test_what_another_stream_lets_go_of_is_waited_for_although_only_one_has_taken(monkeypatch):
    streams = FakeStreams(monkeypatch)
    pool = StreamPool(0, 1024)
    block = pool.take_block(1024)
    streams.current = 2  # reads it last
    del block
    streams.current = 1
    pool.take_block(1024)
    assert streams.events == [2] and streams.waits == [(1, 2)]


def test_a_capture_neither_waits_nor_counts_as_a_stream(monkeypatch):
    streams = FakeStreams(monkeypatch)
    pool = StreamPool(0, 1024)
    streams.current, streams.captures = 7, True
    captured = pool.take_block(512)
    streams.current, streams.captures = 1, False
    pool.take_block(512)
    pool.take_block(512)
    assert streams.events == streams.waits == []
    del captured
    assert pool.try_take_block(1024) is None and pool.try_take_block(512) is not None
    with pytest.raises(PoolFullError):
        pool.take_block(1024)
