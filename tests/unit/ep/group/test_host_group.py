"""HostGroup: set-up calls between ranks, and those of a process that takes a dead rank's place alone."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from eprt.ep.errors import EPTimeoutError, RankLostError
from eprt.ep.group import group as group_module
from eprt.ep.group.group import EPGroup
from eprt.ep.group.host_board import HostBoard


@pytest.fixture
def board():
    with contextlib.closing(HostBoard.create(3)) as made:
        yield made


def set_up(board: HostBoard, rank: int, **options) -> EPGroup:
    return EPGroup.from_host(HostBoard(os.dup(board.fd), board.size), rank, **options)


def on_all_ranks(board: HostBoard, run: Callable[[EPGroup], object]) -> list:
    """What run(group) returns on each rank, every rank a thread."""
    results: list = [None] * board.size

    def of_rank(rank: int) -> None:
        results[rank] = run(set_up(board, rank))

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(board.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def calls(group: EPGroup) -> tuple:
    """What a rank does while it sets up."""
    said = group.allgather((group.rank, "x" * group.rank))
    window = group.shared_window(64 * (1 + group.rank))
    window.segments[group.rank][:] = 1 + group.rank
    group.barrier()
    sums = [int(segment.sum()) for segment in window.segments]
    return group, said, window, sums


def test_all_ranks_hear_the_same_and_share_memory(board):
    for rank, (group, said, _, sums) in enumerate(on_all_ranks(board, calls)):
        assert said == [(0, ""), (1, "x"), (2, "xx")]
        assert sums == [64, 256, 576]
        assert (group.rank, group.size, group.num_nodes, group.local_ranks) == (rank, 3, 1, (0, 1, 2))
        assert group.num_ranks_on_host == 3 and not group.joins
        group.close()


def test_a_joiner_sets_up_alone_with_its_own_segment_clear(board):
    groups = on_all_ranks(board, calls)
    joiner = set_up(board, 1, joins=True)
    assert joiner.joins
    assert joiner.allgather((1, "anew")) == [(0, ""), (1, "anew"), (2, "xx")]
    window = joiner.shared_window(128)
    assert [int(segment.sum()) for segment in window.segments] == [64, 0, 576]
    window.segments[1][0] = 5
    joiner.barrier()
    survivors = groups[0][2]
    assert survivors.segments[1][0] == 5 and not survivors.segments[1][1:].any()
    # The next one in this place hears of it; a value that nobody has said yet is None, and nobody is awaited.
    assert joiner.allgather("beyond") == [None, "beyond", None]
    another = set_up(board, 2, joins=True)
    assert another.allgather(0)[1] == (1, "anew")


def test_what_was_said_lastingly_is_what_the_process_says_that_is_the_rank_now(board):
    told = on_all_ranks(board, lambda group: group.lasting_allgather(f"rank {group.rank}"))
    assert [of_rank(rank) for of_rank in told for rank in range(3)] == ["rank 0", "rank 1", "rank 2"] * 3
    joiner = set_up(board, 1, joins=True).lasting_allgather("rank 1 again")
    assert [joiner(rank) for rank in range(3)] == ["rank 0", "rank 1 again", "rank 2"]
    assert told[0](1) == told[2](1) == "rank 1 again"


def test_a_lasting_window_is_as_its_rank_left_it(board):
    def last(group: EPGroup) -> object:
        window = group.lasting_window(100)
        window.segments[group.rank][:] = 1 + group.rank
        return window

    on_all_ranks(board, last)
    joiner = set_up(board, 2, joins=True)
    assert [int(segment[0]) for segment in joiner.lasting_window(100).segments] == [1, 2, 3]


def test_a_joiner_with_other_memory_is_refused(board):
    on_all_ranks(board, calls)
    joiner = set_up(board, 1, joins=True)
    joiner.allgather(0)
    with pytest.raises(ValueError, match=r"\[rank 1/3\] cannot join: its memory of 100 B .*'window', 128"):
        joiner.shared_window(100)


def test_calls_in_another_order_are_told(board):
    on_all_ranks(board, calls)
    joiner = set_up(board, 1, joins=True)
    with pytest.raises(RuntimeError, match="set-up call 1 is barrier here and allgather on rank 0"):
        joiner.barrier()


def test_a_rank_that_ends_during_set_up_is_named(board):
    board.mark_ended(1, True)
    with pytest.raises(RankLostError, match="rank 1 died during set-up"):
        set_up(board, 0)


def test_what_a_rank_said_before_it_ended_counts(board):
    on_all_ranks(board, lambda group: group.allgather(group.rank))
    board.mark_ended(0, True)
    assert set_up(board, 1, joins=True).allgather(1) == [0, 1, 2]


def test_a_rank_that_does_not_come_is_named_at_the_deadline(board, monkeypatch):
    monkeypatch.setenv("EPRT_SET_UP_TIMEOUT_S", "0.05")
    with pytest.raises(EPTimeoutError, match=r"for ranks 1, 2 in set-up call 0 \(allgather\).*EPRT_SET_UP_TIMEOUT_S$"):
        set_up(board, 0)


def test_a_wait_in_set_up_shows_the_peer_and_the_call_while_it_lasts(board):
    groups = on_all_ranks(board, lambda group: group)
    thread = threading.Thread(target=groups[0].barrier)
    thread.start()
    deadline_s = time.monotonic() + 60
    while (wait := groups[0].current_wait) is None:
        assert time.monotonic() < deadline_s
    assert (wait.peer, wait.phase) == (1, "set-up call 1 (barrier)")
    for group in groups[1:]:
        others = threading.Thread(target=group.barrier)
        others.start()
    thread.join(60)
    others.join(60)
    assert groups[0].current_wait is None and not thread.is_alive()
    for group in groups:
        group.close()


def test_virtual_nodes_are_for_mpirun(board, monkeypatch):
    monkeypatch.setenv("EPRT_RANKS_PER_NODE", "1")
    with pytest.raises(ValueError, match="EPRT_RANKS_PER_NODE splits the ranks of mpirun only"):
        set_up(board, 0)


def test_a_group_of_one_has_memory_and_no_peers():
    with contextlib.closing(HostBoard.create(1)) as board:
        group = set_up(board, 0)
        assert group.shared_window(10).segments[0].nbytes == 10
        with pytest.raises(ValueError, match="sends no message to rank 1"):
            group.isend(group.shared_window(1).segments[0], 1, 0)
        with pytest.raises(ValueError, match="no message from rank 1"):
            group.irecv(group.shared_window(1).segments[0], 1, 0)
        group.close()


def test_the_end_of_a_process_is_awaited(board, monkeypatch):
    group = on_all_ranks(board, lambda group: group)[0]
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    group.watch(1, ended.pid)
    monkeypatch.setattr(group_module, "MAX_END_S", 0.05)
    with pytest.raises(EPTimeoutError, match=r"^\[rank 0/3\] waited 0\.\d s for rank 1 in the end of its process"):
        group.wait_ended([1])
    monkeypatch.undo()
    ended.communicate(b"\n")
    group.wait_ended([1])
    group.wait_ended([])
    group.close()
