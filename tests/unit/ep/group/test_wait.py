"""Waits of one rank: what others see of one that lasts, and that it is gone when the wait is over."""

import math
import time

import pytest

from eprt.ep.errors import EPTimeoutError, RankLostError, ViewChangedError
from eprt.ep.group.current_wait import CurrentWait
from eprt.ep.group.group import SingleGroup
from eprt.ep.group.view import View
from eprt.ep.group.wait import Waiter


class Group(SingleGroup):
    """As rank 0 of four sees it."""

    def __init__(self):
        super().__init__()
        self.size, self.view = 4, View.full(4)
        self.lost: tuple[int, ...] = ()

    def lost_ranks(self) -> tuple[int, ...]:
        return self.lost


class Slices:
    """Native slices that find these indices missing, one after the other; what others saw of the wait in each."""

    def __init__(self, group: Group, *missing: int):
        self.group, self.missing = group, list(missing)
        self.seen: list[CurrentWait | None] = []

    def __call__(self) -> int:
        self.seen.append(self.group.current_wait)
        return self.missing.pop(0) if self.missing else -1


def describe(index: int) -> tuple[int, int]:
    return index + 1, 7


def test_a_wait_that_ends_in_its_first_slice_is_never_shown():
    group = Group()
    slices = Slices(group)
    Waiter(group, 9.0).for_call(slices, (), describe, 8, "dispatch")
    assert slices.seen == [None] and group.current_wait is None


def test_a_wait_that_lasts_names_the_missing_rank_the_call_and_its_beginning():
    group = Group()
    slices = Slices(group, 1, 1, 2)
    before_s = time.monotonic()
    Waiter(group, 9.0).for_call(slices, (), describe, 8, "dispatch")
    first, *later = slices.seen
    assert first is None and group.current_wait is None
    assert [(wait.peer, wait.phase) for wait in later if wait] == [(2, "dispatch"), (2, "dispatch"), (3, "dispatch")]
    since_s = {wait.since_s for wait in later if wait}
    assert len(since_s) == 1 and before_s <= since_s.pop() <= time.monotonic()


def test_nothing_is_shown_any_more_after_a_deadline_a_loss_or_an_interruption():
    group = Group()
    with pytest.raises(EPTimeoutError, match=r"waited .* for rank 2 in combine: epoch seen 7, expected 8"):
        Waiter(group, 0.0).for_call(Slices(group, *[1] * 9), (), describe, 8, "combine")
    assert group.current_wait is None
    group.lost = (3,)
    with pytest.raises(RankLostError, match="rank 3 died during combine"):
        Waiter(group, 9.0).for_call(Slices(group, 1, 1), (), describe, 8, "combine")
    assert group.current_wait is None
    group.lost = ()

    def interrupt() -> None:
        assert group.current_wait is not None
        raise ViewChangedError("another view")

    group.interrupt = interrupt
    with pytest.raises(ViewChangedError):
        Waiter(group, math.inf).for_call(Slices(group, 1, 1), (), describe, 8, "combine")
    assert group.current_wait is None


def test_a_rank_that_died_in_order_is_named_only_for_its_own_data():
    group = Group()
    group.fails_in_order, group.lost = True, (3,)
    slices = Slices(group, 0, 0, 2)
    with pytest.raises(RankLostError, match="rank 3 died during dispatch"):
        Waiter(group, 9.0).for_call(slices, (), describe, 8, "dispatch")
    assert not slices.missing, "rank 1 was awaited although rank 3 had died"
