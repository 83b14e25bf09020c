"""StreamPool: memory that one stream gave back is waited for by the others."""

import pytest

from eprt.compat.deep_ep.pool import PoolFullError
from eprt.compat.deep_ep.stream_pool import StreamPool
from tests.unit.compat.deep_ep.cases import FakeStreams


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
