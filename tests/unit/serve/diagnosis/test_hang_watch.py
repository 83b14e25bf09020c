"""When a wait is a hang: by heartbeats alone, soon where they are missing, later where the rank lives."""

from types import SimpleNamespace
from typing import Any

import pytest
from eprt.diagnostics.log.standing import Standing

from eprt.serve.diagnosis import hang_watch
from eprt.serve.diagnosis.hang_watch import LOOK_S, HangWatch

WINDOW_S, DEADLINE_S = 10.0, 30.0


class Watched:
    """Ranks whose standings are set by hand, a clock, and the watch."""

    def __init__(self, monkeypatch, num_ranks: int = 4):
        self.now_s = 1000.0
        monkeypatch.setattr(hang_watch.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(hang_watch.time, "time", lambda: self.now_s + 1e9)
        self.watch = HangWatch(WINDOW_S, DEADLINE_S)
        self.standings = {rank: Standing(0.1) for rank in range(num_ranks)}
        self.states: dict[int, str] = {}
        self.begins: set[int] = set()  # ranks without a heartbeat so far
        self.look()

    def ranks(self) -> list[Any]:
        return [
            SimpleNamespace(
                rank=rank,
                beat=None if rank in self.begins else "any",
                standing=lambda _, rank=rank: self.standings[rank],
                process_state=lambda rank=rank: self.states.get(rank, ""),
            )
            for rank in self.standings
        ]

    def look(self, after_s: float = LOOK_S) -> bool:
        self.now_s += after_s
        return self.watch.look(self.ranks(), window=7)

    def all_wait_for(self, culprit: int, seconds: float, stood: Standing) -> tuple[int, ...]:
        """The ranks that hang then."""
        for rank in self.standings:
            self.standings[rank] = stood if rank == culprit else Standing(0.2, culprit, "dispatch", seconds)
        self.look()
        return tuple(hang.culprit.rank for hang in self.watch.hangs)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_missing_rank_is_named_within_three_seconds_of_its_second_missed_beat(monkeypatch, num_ranks):
    watched = Watched(monkeypatch, num_ranks)
    assert watched.all_wait_for(1, 0.9, Standing(1.0)) == ()
    assert watched.all_wait_for(1, 1.4, Standing(1.6)) == ()
    assert watched.all_wait_for(1, 2.0, Standing(2.1)) == (1,)
    (hang,) = watched.watch.hangs
    assert hang.culprit.waiters == tuple(rank for rank in range(num_ranks) if rank != 1) and hang.first_window == 7
    assert hang.since_s == pytest.approx(watched.now_s + 1e9 - 2.0)


def test_a_hang_begins_once_keeps_its_beginning_and_ends_once(monkeypatch):
    watched = Watched(monkeypatch)
    watched.standings |= {0: Standing(0.1, 2, "combine", 2.0), 2: Standing(2.5)}
    assert watched.look()
    since_s = watched.watch.hangs[0].since_s
    watched.standings |= {0: Standing(0.1, 2, "combine", 2.25), 2: Standing(2.75)}
    assert not watched.look()
    assert watched.watch.hangs[0].since_s == pytest.approx(since_s)
    watched.standings |= {0: Standing(0.1), 2: Standing(0.2)}
    assert watched.look() and watched.watch.hangs == ()


def test_a_rank_that_lives_is_given_more_time(monkeypatch):
    watched = Watched(monkeypatch)
    idle, computes = Standing(0.1), Standing(0.1, state="computes")
    assert watched.all_wait_for(3, 4.9, idle) == () and watched.all_wait_for(3, 5.1, idle) == (3,)
    assert watched.all_wait_for(3, 9.9, computes) == () and watched.all_wait_for(3, 10.1, computes) == (3,)


def test_a_rank_that_takes_long_and_comes_may_take_longer_the_next_time_but_is_named_before_the_deadline(monkeypatch):
    watched = Watched(monkeypatch)
    computes = Standing(0.1, state="computes")
    assert watched.all_wait_for(3, 9.0, computes) == () == watched.all_wait_for(3, 0.1, computes)
    assert watched.all_wait_for(3, 15.0, computes) == ()
    assert watched.all_wait_for(3, 0.6 * DEADLINE_S + 0.1, computes) == (3,)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_a_rank_that_has_just_loaded_has_until_the_deadline_for_its_first_heartbeat(monkeypatch, num_ranks):
    watched = Watched(monkeypatch, num_ranks)
    watched.begins.add(0)
    for late_s in (5.1, DEADLINE_S - 0.1):
        watched.standings[0] = Standing(late_s)
        assert not watched.look() and watched.watch.hangs == (), late_s
    watched.standings[0] = Standing(DEADLINE_S)
    assert watched.look() and [hang.culprit.rank for hang in watched.watch.hangs] == [0]
    watched.begins.clear()
    watched.standings[0] = Standing(0.1)
    assert watched.look() and watched.watch.hangs == (), "it has come"
    watched.standings[0] = Standing(5.1)
    assert watched.look() and [hang.culprit.rank for hang in watched.watch.hangs] == [0], "as before"


def test_a_rank_without_a_first_heartbeat_for_which_others_wait_is_named_at_once(monkeypatch):
    watched = Watched(monkeypatch)
    watched.begins.add(1)
    assert watched.all_wait_for(1, 1.6, Standing(2.1)) == (1,)


def test_a_stopped_process_needs_no_missed_heartbeat(monkeypatch):
    watched = Watched(monkeypatch)
    watched.states[1] = "stopped"
    assert watched.all_wait_for(1, 1.4, Standing(0.4)) == ()
    assert watched.all_wait_for(1, 1.6, Standing(0.6)) == (1,)
    assert watched.watch.standings[1].state == "stopped"


def test_a_rank_without_a_heartbeat_for_which_nobody_waits_is_named_later(monkeypatch):
    watched = Watched(monkeypatch)
    watched.standings[2] = Standing(4.5)
    assert not watched.look() and watched.watch.hangs == ()
    watched.standings[2] = Standing(5.0)
    assert watched.look() and watched.watch.hangs[0].culprit.rank == 2


def test_nobody_is_named_while_this_process_itself_was_held_up(monkeypatch):
    """The heartbeats of that time still lie in its sockets."""
    watched = Watched(monkeypatch)
    for rank in watched.standings:
        watched.standings[rank] = Standing(9.0)
    assert not watched.look(after_s=9.0) and not watched.look() and watched.watch.hangs == ()
    for rank in watched.standings:
        watched.standings[rank] = Standing(0.2)
    assert not any(watched.look() for _ in range(8)) and watched.watch.hangs == ()


def test_a_wait_in_vain_is_traced_to_the_rank_at_the_end_of_the_chain(monkeypatch):
    watched = Watched(monkeypatch)
    assert watched.watch.culprit_of(1) == 1, "nothing more is known"
    watched.standings |= {0: Standing(0.1, 1, "combine", 4.0), 1: Standing(0.1, 2, "dispatch", 4.1), 2: Standing(4.4)}
    watched.look()
    assert [watched.watch.culprit_of(rank) for rank in range(4)] == [2, 2, 2, 3]
    watched.watch.forget()
    assert watched.watch.hangs == () and watched.watch.culprit_of(1) == 1


def test_a_circle_of_waits_is_one_hang(monkeypatch):
    watched = Watched(monkeypatch, 2)
    watched.standings = {0: Standing(0.1, 1, "dispatch", 5.5), 1: Standing(0.1, 0, "dispatch", 5.4)}
    watched.look()
    assert [hang.culprit.ranks for hang in watched.watch.hangs] == [(0, 1)]


def test_a_wait_for_a_rank_that_has_left_is_not_its_hang(monkeypatch):
    watched = Watched(monkeypatch, 2)
    watched.standings = {0: Standing(0.1, 1, "dispatch", 9.0)}
    assert not watched.look() and watched.watch.hangs == ()
