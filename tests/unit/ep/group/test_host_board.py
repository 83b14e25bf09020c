"""HostBoard: values that stay, memory that every process maps at the same place of one file, nothing left behind."""

import contextlib
import mmap
import os

import numpy as np
import pytest

from eprt.ep.group import host_board
from eprt.ep.group.host_board import HostBoard


@pytest.fixture
def board():
    with contextlib.closing(HostBoard.create(3)) as made:
        yield made


def other_view(board: HostBoard) -> HostBoard:
    """As another process has it."""
    return HostBoard(os.dup(board.fd), board.size)


def test_a_value_is_read_by_all_and_stays(board):
    assert board.read_value(2, 7) is None
    board.write_value(2, 7, b"first")
    with contextlib.closing(other_view(board)) as other:
        assert other.read_value(2, 7) == b"first"
        assert other.read_value(2, 6) is None and other.read_value(1, 7) is None
        other.write_value(2, 7, b"of its successor, longer")
    assert board.read_value(2, 7) == b"of its successor, longer"


def test_the_same_value_again_takes_no_room(board, monkeypatch):
    monkeypatch.setattr(host_board, "_HEAP_BYTES", 40)
    for _ in range(100):
        board.write_value(0, 0, b"x" * 20)
    with pytest.raises(RuntimeError, match="rank 0 need more than 40 B"):
        board.write_value(0, 1, b"y" * 20)


def test_too_many_values_are_refused(board):
    with pytest.raises(RuntimeError, match="rank 1 makes more than 65536 set-up calls"):
        board.write_value(1, 1 << 16, b"")


def test_a_value_that_is_not_there_yet_is_none(board):
    """Whoever sees the index before the record asks again."""
    board.write_value(0, 0, b"whole")
    os.pwrite(board.fd, b"W", board._heaps_at + 4)
    assert board.read_value(0, 0) is None


def test_ends_are_marked_by_rank(board):
    board.mark_ended(1, True)
    with contextlib.closing(other_view(board)) as other:
        assert [other.has_ended(rank) for rank in range(3)] == [False, True, False]
    board.mark_ended(1, False)
    assert not board.has_ended(1)


def test_windows_are_the_same_memory_in_all_views(board):
    sizes = [100, 0, mmap.PAGESIZE + 1]
    segments, after = board.map_window(0, sizes)
    assert [segment.nbytes for segment in segments] == sizes
    assert after % (2 << 20) == 0 and after >= sum(sizes)
    assert all(segment.ctypes.data % mmap.PAGESIZE == 0 for segment in segments)
    assert not any(segment.any() for segment in segments)
    with contextlib.closing(other_view(board)) as other:
        theirs, _ = other.map_window(0, sizes)
        theirs[2][-1] = 7
        beyond, _ = other.map_window(after, [100])
        beyond[0][:] = 9
    assert segments[2][-1] == 7 and not segments[0].any()


def test_a_cleared_segment_reads_as_zero_where_it_is_mapped_already(board):
    (first, second), _ = board.map_window(0, [5000, 5000])
    first[:], second[:] = 1, 2
    board.clear_window(first, 0)
    assert not first.any() and (second == 2).all()
    first[:] = 3
    again, _ = board.map_window(0, [5000, 5000])
    assert np.array_equal(again[0], first)


def test_memory_is_taken_where_it_is_touched_only(board):
    before = os.fstat(board.fd).st_blocks
    segments, _ = board.map_window(0, [1 << 36])
    segments[0][1 << 35] = 1
    assert (os.fstat(board.fd).st_blocks - before) * 512 <= 4 << 20  # a huge page at most, and what leads to it
    with pytest.raises(MemoryError, match="a board has room for"):
        board.map_window(0, [1 << 43])
