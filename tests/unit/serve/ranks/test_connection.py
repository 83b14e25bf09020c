"""RankConnection: nothing is heard of a connection before its Hello, and all of it afterwards."""

from unittest.mock import Mock

import pytest

from eprt.serve.ranks.connection import RankConnection
from eprt.serve.ranks.messages import Bye, Drain, Hello, pack

HELLO = Hello("token", 1, 7, "host")


@pytest.fixture(autouse=True)
def loop(monkeypatch) -> Mock:
    loop = Mock()
    monkeypatch.setattr("asyncio.get_running_loop", lambda: loop)
    return loop


def connection(rank: object = None) -> tuple[RankConnection, Mock, Mock]:
    events, transport = Mock(), Mock()
    events.on_hello.return_value = rank
    made = RankConnection(events)
    made.connection_made(transport)
    return made, events, transport


def test_messages_behind_the_hello_are_the_ranks():
    made, events, transport = connection(rank="rank 1")
    made.data_received(pack(HELLO) + pack(Drain("SIGTERM")))
    events.on_hello.assert_called_once_with(HELLO, transport)
    events.on_message.assert_called_once_with("rank 1", Drain("SIGTERM"))
    made.connection_lost(None)
    events.on_closed.assert_called_once_with("rank 1", False)


def test_a_refused_rank_is_not_heard_and_keeps_what_it_is_told():
    made, events, transport = connection(rank=None)
    made.data_received(pack(HELLO) + pack(Drain("SIGTERM")))
    assert not events.on_message.called and not transport.abort.called
    made.connection_lost(None)
    events.on_closed.assert_called_once_with(None, False)


@pytest.mark.parametrize(
    "data", [pack(Bye()), b"\x03\x00\x00\x00abc", b"\xff" * 5000], ids=["no hello", "garbage", "endless"]
)
def test_what_is_no_rank_is_cut_off(data):
    made, events, transport = connection()
    made.data_received(data)
    assert transport.abort.called and not events.on_hello.called and not events.on_message.called


def test_who_says_nothing_is_cut_off(loop):
    made, _, transport = connection(rank="rank 1")
    _, cut = loop.call_later.call_args.args
    assert cut == transport.abort and not loop.call_later.return_value.cancel.called
    made.data_received(pack(HELLO))
    assert loop.call_later.return_value.cancel.called


def test_rank_0_may_take_its_time(loop):
    RankConnection(Mock(), is_rank0=True).connection_made(Mock())
    assert not loop.call_later.called
