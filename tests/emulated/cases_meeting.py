"""What every rank does under emulation when ranks of a team meet on their GPUs (csrc/cuda/meeting.cu)."""

import ctypes
import random
import threading
import time
from unittest.mock import patch

import pytest
import torch

from eprt.ep.errors import EPTimeoutError, RankLostError
from eprt.ep.group.group import EPGroup
from eprt.ep.group.loss_watch import LossWatch
from eprt.ep.group.view import View
from eprt.ep.nvlink import meeting
from eprt.ep.nvlink.meeting import DeviceMeeting

PATIENCE_S = 100.0


class Slates:
    """A word of each rank, which all ranks read."""

    def __init__(self, group: EPGroup):
        self._own = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._address_of = group.allgather(self._own.data_ptr())

    def write(self, value: int) -> None:
        self._own[0] = value

    def read(self, rank: int) -> int:
        return ctypes.c_int64.from_address(self._address_of[rank]).value


def many_meetings(group: EPGroup, size: int, num_meetings: int, first_epoch: int = 0) -> None:
    """Teams of `size` neighbours. What each wrote before is there behind a meeting, and nobody writes again before all
    have read, which the next meeting tells. Some come late, any of them."""
    ranks = range(first := group.rank - group.rank % size, min(first + size, group.size))
    dice = random.Random(group.rank)
    held = DeviceMeeting(group, ranks, timeout_s=PATIENCE_S)
    slates = Slates(group)
    held.restart(first_epoch + 1)
    group.barrier()
    for turn in range(num_meetings):
        if dice.random() < 0.1:
            time.sleep(dice.random() * 0.01)
        slates.write(turn)
        held.wait()
        assert [slates.read(rank) for rank in ranks] == [turn] * len(ranks)
        held.wait()
    held.check()
    assert held.epoch == first_epoch + 2 * num_meetings
    group.barrier()
    held.close()


def around_the_period(group: EPGroup) -> None:
    """Epochs begin anew, and what is left of the last ones is not taken for new."""
    many_meetings(group, group.size, 6, first_epoch=meeting._PERIOD - 5)


def late_rank(group: EPGroup) -> None:
    """The wait has a deadline, and says who waited, for whom, and in what; later ones do not wait for that rank."""
    last, size = group.size - 1, group.size
    held = DeviceMeeting(group, range(size), timeout_s=0.6)
    for _ in range(3):
        held.wait()
    if group.rank != last:
        began_s = time.monotonic()
        held.wait()
        with pytest.raises(EPTimeoutError, match=rf"\[rank {group.rank}/{size}\].*rank {last}.*a prompt that is split"):
            held.check()
        held.wait()
        held.check()
        assert 0.6 < time.monotonic() - began_s < 30
    group.barrier()
    held.close()


def told_wait(group: EPGroup, shown: dict[int, DeviceMeeting]) -> None:
    """The last rank comes only once the kernels of all others tell that they wait for it. shown: shared."""
    last = group.size - 1
    shown[group.rank] = held = DeviceMeeting(group, range(group.size), timeout_s=2 * PATIENCE_S)
    held.wait()
    group.barrier()
    if group.rank == last:
        for rank in range(last):
            deadline_s = time.monotonic() + PATIENCE_S
            while (wait := shown[rank].current_wait()) is None:
                assert time.monotonic() < deadline_s, "no kernel tells of its wait"
                time.sleep(0.01)
            assert wait.peer == last and "prompt" in wait.phase, wait
    held.wait()
    held.check()
    group.barrier()
    held.close()
    assert held.current_wait() is None


def lost_rank(group: EPGroup) -> None:
    """Rank 1 does not come. A thread ends the others' waits, in kernels without a deadline; they go on without it, and
    later with it."""
    lost, size = 1, group.size
    held = DeviceMeeting(group, range(size), timeout_s=PATIENCE_S)
    alive, is_lost, ended = tuple(rank != lost for rank in range(size)), threading.Event(), []

    def meet(view: View | None, num: int = 5) -> None:
        epochs = group.allgather(held.epoch)
        if view is not None:
            group.view = view
            if view.alive[group.rank]:
                held.restart(max(epochs) + 1)
            group.barrier()
        if group.view.alive[group.rank]:
            for _ in range(num):
                held.wait()
            held.check()

    with (
        patch.object(group, "lost_ranks", lambda: (lost,) if is_lost.is_set() and group.view.alive[lost] else ()),
        patch.object(group, "wait_ended", ended.append),
    ):
        meet(None)
        watch = LossWatch(group, held.halt)
        if group.rank != lost:
            threading.Timer(0.2, is_lost.set).start()
            with pytest.raises(RankLostError, match=f"rank {lost} died during a step"):
                held.wait()
                held.check()
            with pytest.raises(RankLostError):
                held.wait()  # nothing is launched any more
        meet(View(1, alive))
        assert ended == [[lost]] * (group.rank != lost)
        is_lost.clear()
        meet(View.full(size))
        watch.close()
    group.barrier()
    held.close()
