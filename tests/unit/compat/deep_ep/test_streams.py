"""CommStream: which stream a call runs on and what it waits for."""

from typing import Any

import pytest

from eprt.compat.deep_ep.event import EventHandle, EventOverlap
from eprt.compat.deep_ep.streams import CommStream
from tests.unit.compat.deep_ep.cases import FakeStreams

COMM = 9  # the number of the stream for calls with async_finish


@pytest.fixture
def streams(monkeypatch) -> FakeStreams:
    return FakeStreams(monkeypatch)


@pytest.fixture
def comm(streams) -> CommStream:
    stream: Any = streams.stream(COMM)
    return CommStream(stream)


def test_a_synchronous_call_runs_on_the_current_stream_and_waits_for_nothing(streams, comm):
    assert not comm.stays_on_stream()
    for _ in range(2):
        with comm.run_call(async_finish=False):
            assert streams.current == comm.raw_stream() == 1
        assert comm.stays_on_stream()
    assert streams.waits == [] and comm.record_event(False) is None


def test_a_synchronous_call_on_another_stream_waits_for_the_last_launch(streams, comm):
    with comm.run_call(async_finish=False):
        pass
    streams.current = 2
    assert not comm.stays_on_stream()
    with comm.run_call(async_finish=False):
        assert streams.current == 2
    assert streams.waits == [(2, "all of 1")] and comm.stays_on_stream()


def test_an_asynchronous_call_runs_on_the_communication_stream_after_its_caller(streams, comm):
    with comm.run_call(async_finish=True):
        assert streams.current == COMM
    event = comm.record_event(True)
    assert streams.current == comm.caller.cuda_stream == 1 and streams.waits == [(COMM, "all of 1")]
    assert event is not None and streams.events == [COMM]
    event.current_stream_wait()
    assert streams.waits[1:] == [(1, COMM)]


def test_a_call_waits_for_the_event_it_is_given_instead_of_for_the_caller(streams, comm):
    streams.current = 3
    event = EventOverlap(EventHandle())
    streams.current = 1
    with comm.run_call(async_finish=True, previous_event=event):
        assert streams.current == COMM
    assert streams.waits == [(COMM, 3)]
    with comm.run_call(async_finish=False, previous_event=event):
        assert streams.current == 1
    assert streams.waits[1:] == [(1, 3), (1, f"all of {COMM}")]


def test_an_event_that_is_none_is_not_waited_for(streams, comm):
    with comm.run_call(async_finish=False):
        pass
    with comm.run_call(async_finish=False, previous_event=EventOverlap()):
        assert streams.current == 1
    assert streams.waits == []


def test_the_second_half_of_a_call_runs_on_the_stream_of_the_first(streams, comm):
    with comm.run_call(async_finish=False):
        first = streams.stream(streams.current)
    streams.current = 2
    with comm.run_call(async_finish=False):
        pass
    with comm.resume_call(first):
        assert streams.current == 1
    assert streams.current == 2 and streams.waits == [(2, "all of 1"), (1, "all of 2")]


def test_a_captured_launch_and_one_that_is_not_captured_need_no_order(streams, comm):
    with comm.run_call(async_finish=False):
        pass
    streams.current, streams.captures = 7, True
    assert not comm.stays_on_stream()
    with comm.run_call(async_finish=False):
        pass
    streams.captures = False
    with comm.run_call(async_finish=False):
        pass
    assert streams.waits == []
