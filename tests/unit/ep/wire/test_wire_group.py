"""WireGroup without processes of its own: ranks are threads, each a node of its own; and what it refuses."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from eprt.ep.wire.wire_group import WireGroup
from tests.ranks.launch_wire import free_port


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("EPRT_RANKS_PER_NODE", "1")
    monkeypatch.setenv("EPRT_TIMEOUT_S", "100")
    monkeypatch.delenv("EPRT_GROUP_KEY", raising=False)


def on_ranks(size, body, wires=None):
    """body(group) on each rank; what it gave, or the error of making the group."""
    address = f"127.0.0.1:{free_port()}"

    def one(rank):
        try:
            group = WireGroup(address, rank, size, wire=wires[rank] if wires else "tcp")
        except Exception as error:
            return error
        try:
            return body(group)
        finally:
            group.close()
            group.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_one_rank():
    (got,) = on_ranks(1, lambda group: (group.num_nodes, group.allgather("a"), group.lost_ranks()))
    assert got == (1, ["a"], ())


@pytest.mark.parametrize("wire", ["tcp:threads=2,arena_kib=1", "paced:arena_kib=1,reorder_us=30,threads=2"])
def test_messages_of_a_tag_stay_in_order(wire):
    def body(group):
        peer, tag = 1 - group.rank, group.new_channel()
        sent = [np.full(700 * i, i + 10 * group.rank, dtype=np.uint8) for i in range(5)]
        got = [np.zeros(700 * i, dtype=np.uint8) for i in range(5)]
        messages = [group.isend(each, peer, tag) for each in sent] + [group.irecv(each, peer, tag) for each in got]
        while messages:
            messages = [message for message in messages if not message.test()]
        return all((each == i + 10 * peer).all() for i, each in enumerate(got)) and not group._open_buffers

    assert on_ranks(2, body, [wire] * 2) == [True, True]


def test_a_cancelled_receive_is_not_written():
    def body(group):
        peer, tag = 1 - group.rank, group.new_channel()
        room = np.zeros(64, dtype=np.uint8)
        group.irecv(room, peer, tag).cancel()
        group.barrier()
        last = np.zeros(64, dtype=np.uint8)
        messages = [group.isend(np.full(64, 7, dtype=np.uint8), peer, tag), group.irecv(last, peer, tag)]
        while messages:
            messages = [message for message in messages if not message.test()]
        return int(room.sum()), int(last.sum())

    assert on_ranks(2, body) == [(0, 448), (0, 448)]


def test_messages_after_the_group_has_closed():
    def body(group):
        message = group.irecv(np.zeros(1, dtype=np.uint8), 1 - group.rank, 1)
        group.close()
        with pytest.raises(ConnectionError, match="closed the group"):
            message.test()
        return True

    assert on_ranks(2, body) == [True, True]


def test_ranks_with_other_wires_are_refused():
    errors = on_ranks(2, lambda group: None, ["tcp", "tcp:threads=2"])
    for error in errors:
        assert isinstance(error, ValueError)
        assert "rank 1 has WireOptions(kind='tcp', threads=2" in str(error) and "the same wire" in str(error)


def test_an_address_that_others_reach_needs_a_key():
    with pytest.raises(ValueError, match=r"\[rank 1/2\] whoever reaches 10.0.0.1:7000 could join: set EPRT_GROUP_KEY"):
        WireGroup("10.0.0.1:7000", 1, 2)


@pytest.mark.parametrize("rank, size", [(-1, 2), (2, 2), (0, 0)])
def test_numbers_of_ranks(rank, size):
    with pytest.raises(ValueError, match=f"rank {rank} of {size}: must be one of"):
        WireGroup("127.0.0.1:7000", rank, size)


def test_a_proxy_thread_that_does_not_exist():
    def body(group):
        with pytest.raises(ValueError, match="no proxy thread 1; there are 1"):
            group.end_proxy_thread(1)
        return True

    assert on_ranks(2, body) == [True, True]
