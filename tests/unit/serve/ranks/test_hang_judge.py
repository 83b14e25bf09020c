"""HangJudge: a rank that hangs asleep is given up soon, one that may compute is not, and a flag decides for both."""

from types import SimpleNamespace
from typing import Any

import pytest
from eprt.diagnostics.log.standing import Standing

from eprt.serve.ranks import hang_judge
from eprt.serve.ranks.hang_judge import HangJudge

LOOK_S = 0.2
STEPS, COMPUTES, ASLEEP, MISSING = (
    Standing(0.2),
    Standing(0.2, state="computes"),
    Standing(0.2, state="asleep"),
    Standing(2.5),
)


class Judged:
    """Three ranks, of which rank 1 stands as a test says while the others wait for it; a clock, and the judge."""

    def __init__(self, monkeypatch, timeout_s: float | None = None, sees_sleep: bool = True, num_ranks: int = 3):
        self.now_s, self.began_s, self.idle, self.confirms = 1000.0, 1000.0, True, True
        monkeypatch.setattr(hang_judge.time, "monotonic", lambda: self.now_s)
        self.judge = HangJudge(timeout_s, sees_sleep)
        self.stood, self.step_s, self.quiet_s = STEPS, 0.01, {}
        self.ranks: list[Any] = [self._rank(number) for number in range(num_ranks)]
        self.look()
        self.began_s = self.now_s

    def _rank(self, number: int) -> SimpleNamespace:
        judged = self

        class _Rank(SimpleNamespace):
            @property
            def is_idle(self) -> bool:
                return judged.idle

            @property
            def stats(self) -> SimpleNamespace:
                return SimpleNamespace(last_step_s=judged.step_s)

            def standing(self, now_s: float) -> Standing:
                if number == 1 or len(judged.ranks) == 1:
                    return judged.stood
                return Standing(0.2, 1, "dispatch", now_s - judged.began_s)

            @property
            def beat_s(self) -> float:
                return judged.now_s - 0.2 if judged.confirms else judged.began_s

        return _Rank(rank=number, pid=100 + number)

    def look(self, after_s: float = LOOK_S) -> list[int]:
        self.now_s += after_s
        return [rank.rank for rank, _ in self.judge.look(self.ranks, self.quiet_s)]

    def given_up_after(self, most_s: float = 25.0) -> float | None:
        """Seconds of waiting until the judge gives rank 1 up; None: it does not."""
        while self.now_s - self.began_s < most_s:
            if found := self.look():
                assert found == [1]
                return self.now_s - self.began_s
        return None


@pytest.mark.parametrize("stood", [STEPS, ASLEEP, MISSING])
def test_a_rank_that_does_nothing_is_given_up_after_a_second(monkeypatch, stood):
    judged = Judged(monkeypatch)
    judged.stood = stood
    assert judged.given_up_after() == pytest.approx(1.0, abs=LOOK_S + 1e-6)
    ((_, evidence),) = judged.judge.look(judged.ranks, {})
    assert "ranks 0, 2 wait for it" in evidence and "dispatch" in evidence


def test_where_steps_are_long_it_is_ten_of_them(monkeypatch):
    judged = Judged(monkeypatch)
    judged.step_s = 0.5
    for _ in range(64):
        judged.look()
    judged.began_s = judged.now_s
    assert judged.given_up_after() == pytest.approx(5.0, abs=LOOK_S + 1e-6)


@pytest.mark.parametrize(
    "stood, idle", [(COMPUTES, True), (STEPS, False), (MISSING, False), (ASLEEP, False)], ids=lambda each: str(each)
)
def test_a_rank_that_may_compute_or_wants_a_core_is_left_to_the_deadline_of_waits(monkeypatch, stood, idle):
    judged = Judged(monkeypatch)
    judged.stood, judged.idle = stood, idle
    assert judged.given_up_after() is None


def test_one_look_that_finds_it_at_work_begins_anew(monkeypatch):
    judged = Judged(monkeypatch)
    for turn in range(60):
        judged.idle = turn % 4 != 3
        assert judged.look() == []


def test_a_wait_that_may_have_ended_since_it_was_told_of_counts_nothing(monkeypatch):
    judged = Judged(monkeypatch)
    judged.stood, judged.confirms = ASLEEP, False
    assert judged.given_up_after() is None


def test_waits_for_a_gpu_look_like_sleep(monkeypatch):
    assert Judged(monkeypatch, sees_sleep=False).given_up_after() is None


@pytest.mark.parametrize("stood, idle", [(COMPUTES, False), (STEPS, True), (MISSING, False)])
@pytest.mark.parametrize("timeout_s, sees_sleep", [(0.5, True), (7.0, False)])
def test_with_a_flag_every_rank_is_given_up_then(monkeypatch, stood, idle, timeout_s, sees_sleep):
    judged = Judged(monkeypatch, timeout_s, sees_sleep)
    judged.stood, judged.idle = stood, idle
    assert judged.given_up_after() == pytest.approx(timeout_s, abs=LOOK_S + 1e-6)


def test_after_a_pause_of_the_frontend_itself_nobody_is_judged(monkeypatch):
    judged = Judged(monkeypatch, timeout_s=1.0)
    assert judged.look(after_s=20.0) == [] and judged.look() == [1]
    judged = Judged(monkeypatch)
    assert judged.look(after_s=20.0) == []
    assert [judged.look() for _ in range(5)] == [[], [], [], [1], [1]], "idle looks count from the pause on"


def test_a_circle_of_waits_has_no_culprit(monkeypatch):
    judged = Judged(monkeypatch, timeout_s=1.0)
    judged.stood = Standing(0.2, 0, "combine", 9.0)
    assert judged.given_up_after() is None


def test_a_rank_alone_is_judged_by_how_long_it_says_nothing(monkeypatch):
    judged = Judged(monkeypatch, num_ranks=1)
    assert judged.look() == [], "it has no requests"
    judged.quiet_s = {0: 0.5}
    assert not any(judged.look() for _ in range(8))
    judged.quiet_s = {0: 1.5}
    assert judged.look() == [0]
    judged.idle = False
    assert judged.look() == []
