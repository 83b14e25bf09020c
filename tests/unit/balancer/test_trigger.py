"""Trigger: what a plan would save against what it costs."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from eprt.balancer import Placement, RoutingTrace
from eprt.balancer.job import PlanRequest, solve
from eprt.balancer.trigger import Outlook, Trigger, TriggerConfig

from tests.unit.balancer.cases import BETTER, COSTS, NOW, decide


def test_the_figures_of_a_decision_are_exact():
    decision = decide(Trigger())
    assert decision.migrate and decision.verdict == "migrate"
    assert (decision.before, decision.after) == pytest.approx((1.6, 1.0))
    assert decision.saving_us_per_step == pytest.approx(300 / 10 * 20)  # 30 tokens per step fewer on the busiest GPU
    assert decision.lifetime_steps == pytest.approx(1000 * 10)
    assert decision.saving_us == pytest.approx(600 * 10_000)
    assert decision.moved_experts == 1 and decision.moved_bytes == 1e6
    assert decision.cost_us == pytest.approx(1e6 / 100)
    assert decision.to_json()["verdict"] == "migrate"


def test_what_the_busiest_gpu_sends_costs_as_what_it_takes_in():
    swapped = solve(PlanRequest(NOW, Placement(np.array([[0, 2, 3, 1, 4, -1]]), num_gpus=2)))
    decision = decide(Trigger(), answer=swapped)
    assert decision.moved_experts == 2 and decision.cost_us == pytest.approx(2 * 1e6 / 100)


def test_the_saving_must_be_worth_the_move_by_the_hysteresis():
    """600 us per step x 10 steps/s x lifetime against 1.5 x 10 000 us."""
    assert decide(Trigger(), lifetime_s=2.51).migrate
    kept = decide(Trigger(), lifetime_s=2.49)
    assert kept.verdict == "keep" and "less than 1.5 times the cost" in kept.reason
    assert decide(Trigger(TriggerConfig(hysteresis=1.4)), lifetime_s=2.49).migrate
    assert not decide(Trigger(), lifetime_s=0.0).migrate
    assert decide(Trigger(TriggerConfig(max_lifetime_s=60)), lifetime_s=1e9).lifetime_steps == 600
    assert not decide(Trigger(), costs=replace(COSTS, us_per_token=0.0)).migrate
    assert not decide(Trigger(), costs=replace(COSTS, bytes_per_us=1e-3)).migrate


def test_fewer_crossings_between_nodes_are_worth_a_move_too():
    """Two choices per token: 50 tokens a step in the one layer, on each of two ranks 25."""
    same = solve(PlanRequest(NOW, NOW))
    metrics = {"traffic_per_token_before": 0.9, "traffic_per_token": 0.5, "choices_per_token": 2}
    saved = replace(same, target=replace(NOW, metrics=metrics))
    decision = decide(Trigger(TriggerConfig(us_per_crossing=3.0)), answer=saved)
    assert decision.migrate and (decision.crossings_before, decision.crossings_after) == (0.9, 0.5)
    assert decision.traffic_us_per_step == decision.saving_us_per_step == pytest.approx(0.4 * 25 * 3.0)
    assert "crossings/token 0.900 -> 0.500" in str(decision)
    kept = decide(Trigger(TriggerConfig(us_per_crossing=3.0, min_gain=0.5)), answer=saved)
    assert kept.verdict == "keep" and "0.0% of the mean load and 44.4% of the crossings" in kept.reason
    assert decide(Trigger(TriggerConfig(us_per_crossing=0.0)), answer=saved).verdict == "keep"
    both = replace(BETTER, target=replace(BETTER.target, metrics={**metrics, "traffic_per_token": 1.0}))
    decision = decide(Trigger(TriggerConfig(us_per_crossing=3.0)), answer=both)
    assert decision.saving_us_per_step == pytest.approx(600 - 0.1 * 25 * 3.0), "more crossings cost"


def test_a_plan_tells_the_trigger_what_it_saves_between_nodes():
    rng = np.random.default_rng(0)
    trace = RoutingTrace((np.concatenate((rng.integers(0, 2, (200, 2)) * 2, rng.integers(0, 2, (200, 2)) * 2 + 1)),))
    current = Placement(np.array([[0, 1, 2, 3]]), num_gpus=2, num_nodes=2)  # what goes together lies apart
    answer = solve(PlanRequest(current, load_LE=np.ones((1, 4)), trace=trace))
    outlook = Outlook(np.full((1, 4), 100.0), COSTS, lifetime_s=1e9)
    decision = Trigger().decide(0.0, current, answer.target, answer.rounds, outlook)
    assert decision.crossings_after < decision.crossings_before and decision.traffic_us_per_step > 0
    per_token = decision.crossings_before - decision.crossings_after
    assert decision.traffic_us_per_step == pytest.approx(per_token * 400 / 2 / 10 / 2 * 0.4)


def test_a_small_gain_is_left_alone():
    same = solve(PlanRequest(NOW, NOW))
    kept = decide(Trigger(), answer=same)
    assert kept.verdict == "keep" and "less than 2.0%" in kept.reason and kept.moved_experts == 0
    assert decide(Trigger(TriggerConfig(min_gain=0.61))).verdict == "keep"
    assert decide(Trigger(TriggerConfig(min_gain=0.59))).verdict == "migrate"


def test_a_pause_follows_each_migration_and_grows_with_failures():
    trigger = Trigger(TriggerConfig(cooldown_s=30, failure_cooldown_s=60))
    trigger.migration_ended(100.0, succeeded=True)
    assert trigger.cooldown_left_s(110.0) == 20
    cooling = decide(trigger, now_s=110.0)
    assert cooling.verdict == "cooling" and "20 s to wait" in cooling.reason
    assert decide(trigger, now_s=130.0).migrate
    waits = []
    for now_s in (200.0, 1000.0, 3000.0):
        trigger.migration_ended(now_s, succeeded=False)
        waits.append(trigger.cooldown_left_s(now_s))
    assert waits == [60, 120, 240]
    for _ in range(20):
        trigger.migration_ended(0.0, succeeded=False)
    assert trigger.cooldown_left_s(0.0) == 60 * 64  # an hour, whatever happens
    trigger.migration_ended(0.0, succeeded=True)
    trigger.migration_ended(0.0, succeeded=False)
    assert trigger.cooldown_left_s(0.0) == 60


def test_a_dry_run_says_what_it_would_do():
    decision = decide(Trigger(TriggerConfig(dry_run=True)))
    assert decision.verdict == "dry_run" and not decision.migrate and decision.saving_us > decision.cost_us
    assert decide(Trigger(TriggerConfig(dry_run=True)), lifetime_s=0).verdict == "keep"


def test_each_decision_is_logged_with_its_figures(caplog):
    caplog.set_level(logging.INFO, "eprt.balancer.trigger")
    decide(Trigger())
    decide(Trigger(), lifetime_s=0.0)
    assert [record.getMessage() for record in caplog.records] == [
        "rebalance migrate: worth it (max/mean 1.600 -> 1.000, saves 600.0 us/step x 10000 steps = 6000.0 ms, "
        "costs 10.0 ms for 1 experts, 1.00 MB)",
        "rebalance keep: the saving is less than 1.5 times the cost (max/mean 1.600 -> 1.000, saves 600.0 us/step x 0 "
        "steps = 0.0 ms, costs 10.0 ms for 1 experts, 1.00 MB)",
    ]


def test_a_slow_gpu_counts_by_its_time():
    """GPU 0 at half speed has 1600 token-times; the mean is 1000 tokens over 1.5 GPUs."""
    decision = decide(Trigger(), gpu_speed=np.array([0.5, 1.0]))
    assert decision.before == pytest.approx(1600 / (1000 / 1.5)) and decision.after == pytest.approx(1.5)
    masked = decide(Trigger(), gpu_speed=np.array([0.0, 1.0]))
    assert masked.before > 1e5  # load on a masked GPU takes for ever


def test_what_earlier_plans_over_estimated_is_taken_off():
    assert decide(Trigger(), optimism=9.0).saving_us == 0 and not decide(Trigger(), optimism=0.59).migrate
    assert decide(Trigger(), optimism=0.3).after == pytest.approx(1.3)


@pytest.mark.parametrize("name", ["hysteresis", "min_gain", "cooldown_s", "failure_cooldown_s", "max_lifetime_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_config_that_makes_no_sense_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        TriggerConfig(**{name: value})
