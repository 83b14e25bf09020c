"""Views, and who is watched in them."""

import os
import subprocess
import sys

import pytest

from eprt.ep.errors import RankLostError
from eprt.ep.group.group import EPGroup
from eprt.ep.group.liveness import PeerWatch
from eprt.ep.group.view import View
from eprt.ep.group.wait import Waiter


def sleeper() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])


def ended(watch: PeerWatch, process: subprocess.Popen) -> tuple[int, ...]:
    process.kill()
    process.wait()
    return watch.lost()


def test_views_count_and_name_their_ranks():
    full = View.full(3)
    assert full.is_full and full.ranks == (0, 1, 2) and full.number == 0
    less = full.without(1)
    assert (less.number, less.ranks, less.is_full) == (1, (0, 2), False)
    assert less.without(0) == View(2, (False, False, True))
    assert View.alone(2, 3) == View(0, (False, False, True))


def test_a_rank_that_comes_back_is_watched_anew():
    first, second = sleeper(), sleeper()
    watch = PeerWatch({1: first.pid, 2: os.getpid()})
    assert ended(watch, first) == (1,)
    watch.watch(1, first.pid)  # nothing new
    assert watch.lost() == (1,)
    watch.watch(1, second.pid)
    assert watch.lost() == ()
    assert ended(watch, second) == (1,)
    watch.watch(1, second.pid + (1 << 22))  # no such process
    assert watch.lost() == (1,)
    watch.close()


def test_the_rank_that_was_noticed_first_is_the_first_of_the_lost():
    """And not the lowest: that one may have ended because of the other."""
    group, processes = EPGroup.single(), {rank: sleeper() for rank in (1, 2, 3)}
    group.size, group.view = 4, View.full(4)
    for rank, process in processes.items():
        group.watch(rank, process.pid)
    for rank, lost in ((3, (3,)), (1, (3, 1)), (2, (3, 1, 2))):
        processes[rank].kill()
        processes[rank].wait()
        assert group.lost_ranks() == lost
    with pytest.raises(RankLostError, match=r"rank 3 died during dispatch, and ranks 1, 2; restart the job") as caught:
        Waiter(group, 60).for_call(lambda: 1, (), lambda index: (1, 0), 1, "dispatch")
    assert (caught.value.lost, caught.value.others) == (3, (1, 2))
    group.view = View(1, (True, True, True, False))
    assert group.lost_ranks() == (1, 2)
    group.close()


def test_only_ranks_of_the_view_are_lost():
    group, process = EPGroup.single(), sleeper()
    group.size, group.view = 2, View(1, (True, True))
    group.watch(0, process.pid)  # itself: nobody watches that
    group.watch(1, process.pid)
    assert group.lost_ranks() == ()
    process.kill()
    process.wait()
    assert group.lost_ranks() == (1,)
    group.view = View(2, (True, False))
    assert group.lost_ranks() == ()
    group.close()
