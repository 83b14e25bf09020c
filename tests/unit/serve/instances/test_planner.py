"""The planner's rule, on load that steps, rises, falls and swings: it follows, and does not flap."""

import itertools
import math
from collections.abc import Callable

import pytest

from eprt.serve.instances.planner import RoleState, RoleWindow, ScaleRule, changed, plan_role

RULE = ScaleRule(least=1, most=6, target_s=1.0, cooldown_s=20.0)
WINDOW_S = 5.0
PROMPT_S = 0.1  # that a prompt takes alone


class Simulated:
    """Prefill instances, each of which computes a second of prompts in a second; one takes two windows to load."""

    def __init__(self, rule: ScaleRule = RULE, num: int = 1):
        self.rule, self.num, self.state = rule, num, RoleState()
        self.queue_s = self.now_s = 0.0
        self.loading_s: list[float] = []  # when they are ready
        self.nums: list[int] = []  # of each window
        self.changes: list[int] = []
        self.predicted_s: list[float] = []

    def run(self, load: Callable[[float], float], num_windows: int) -> "Simulated":
        """load(t): seconds of prompts that come in a second."""
        for _ in range(num_windows):
            self.now_s += WINDOW_S
            self.num += sum(at_s <= self.now_s for at_s in self.loading_s)
            self.loading_s = [at_s for at_s in self.loading_s if at_s > self.now_s]
            busy = load(self.now_s)
            self.queue_s = max(0.0, self.queue_s + WINDOW_S * (busy - self.num))
            predicted_s = PROMPT_S * (1 + min(busy / self.num, 1)) + self.queue_s / self.num
            fewer = busy / (self.num - 1) if self.num > 1 else math.inf
            window = RoleWindow(self.now_s, self.num, len(self.loading_s), predicted_s, PROMPT_S, fewer)
            plan = plan_role(self.rule, self.state, window)
            self.state = plan.state
            if plan.change:
                self.state = changed(self.rule, self.state, plan.change, self.now_s)
                self.changes.append(plan.change)
                if plan.change > 0:
                    self.loading_s.append(self.now_s + 2 * WINDOW_S)
                else:
                    self.num -= 1
            self.nums.append(self.num)
            self.predicted_s.append(predicted_s)
        return self


def test_a_step_of_load_is_followed_and_held():
    one = Simulated().run(lambda t: 0.4 if t < 100 else 2.6, 200)
    assert one.nums[18] == 1 and one.num >= 3
    assert all(change == 1 for change in one.changes) and one.predicted_s[-1] < RULE.target_s


def test_a_fall_of_load_lets_them_go_one_at_a_time_to_the_least():
    one = Simulated(num=4).run(lambda t: 0.1, 120)
    assert one.changes == [-1, -1, -1] and one.num == 1
    steps = [i for i, (before, after) in enumerate(zip(one.nums, one.nums[1:])) if after < before]
    assert min(after - before for before, after in itertools.pairwise(steps)) * WINDOW_S >= RULE.cooldown_s


def test_a_ramp_is_followed_up_and_down_without_a_step_back():
    def ramp(t: float) -> float:
        return 0.3 + 4.0 * max(0.0, 1 - abs(t - 1500) / 1500)

    one = Simulated().run(ramp, 620)
    first_down = one.changes.index(-1)
    assert set(one.changes[:first_down]) == {1} and set(one.changes[first_down:]) == {-1}
    assert max(one.nums) in (5, 6) and one.num == 1


def swinging(period_s: float, num_windows: int) -> Simulated:
    """Between what one instance can do and what needs three."""
    return Simulated().run(lambda t: 0.5 if t % period_s < period_s / 2 else 2.2, num_windows)


@pytest.mark.parametrize("period_s", [10, 30, 60, 120, 240])
def test_load_that_swings_fast_makes_few_changes(period_s):
    """In four hours: letting one go takes ever more quiet windows where it was too early."""
    assert swinging(period_s, 2880).changes.count(-1) <= 7


@pytest.mark.parametrize("period_s", [600, 1200])
def test_load_that_swings_slowly_is_followed_once_a_period(period_s):
    one = swinging(period_s, 2880)
    assert max(one.nums) == 4 and one.changes.count(-1) <= 3 * 4 * 3600 / period_s
    ups_and_downs = [change for change, _ in itertools.groupby(one.changes)]
    assert len(ups_and_downs) <= 2 * 4 * 3600 / period_s + 1


def test_noise_around_the_bounds_changes_nothing():
    one = Simulated(num=2).run(lambda t: 0.58 + 0.1 * math.sin(t), 1000)
    assert len(one.changes) <= 2


def test_more_instances_are_no_remedy_for_prompts_that_take_too_long_alone():
    state = RoleState()
    for i in range(20):
        plan = plan_role(RULE, state, RoleWindow(WINDOW_S * i, 1, 0, 3.1, 3.0, math.inf))
        assert plan.change == 0
        state = plan.state


def test_the_bounds_hold():
    assert Simulated(ScaleRule(1, 2, 1.0, 20.0)).run(lambda t: 9.0, 100).num == 2
    assert Simulated(ScaleRule(2, 4, 1.0, 20.0), num=3).run(lambda t: 0.0, 100).num == 2


def test_too_few_are_made_up_for_unless_they_come_back():
    state, changes = RoleState(), []
    for i in range(3):
        plan = plan_role(ScaleRule(2, 4, 1.0, 20.0), state, RoleWindow(5.0 * i, 1, 0, 0.0, 0.0, math.inf))
        state = plan.state
        changes.append(plan.change)
    assert changes == [0, 0, 1] and plan.why == "1 are fewer than 2"


def test_what_runs_out_counts_like_time():
    state = RoleState()
    for i in range(3):
        plan = plan_role(RULE, state, RoleWindow(WINDOW_S * i, 1, 0, 0.01, 0.01, math.inf, used=0.9))
        state = plan.state
    assert plan.change == 1 and plan.why == "predicted 0.01 s of 1 s, 90% in use"


def test_nothing_is_changed_while_one_loads():
    state = RoleState(num_near=9)
    assert plan_role(RULE, state, RoleWindow(0.0, 1, 1, 9.0, 0.1, math.inf)).change == 0
