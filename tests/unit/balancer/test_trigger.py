"""Trigger and Controller: what a plan would save against what it costs, and from a server's counters to a decision."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from eprt.balancer import Placement, RoutingTrace
from eprt.balancer.controller import Controller, ServerSnapshot
from eprt.balancer.job import PlanRequest, solve
from eprt.balancer.trigger import Costs, Outlook, Trigger, TriggerConfig

# Two GPUs of three slots; experts 0 and 1 are hot and lie together, slot 5 is empty.
NOW = Placement(np.array([[0, 1, 2, 3, 4, -1]]), num_gpus=2)
RATE_LE = np.array([[400.0, 300.0, 100.0, 100.0, 100.0]])  # tokens per second; GPU 0: 800, GPU 1: 200
BETTER = solve(PlanRequest(NOW, Placement(np.array([[0, 2, -1, 3, 4, 1]]), num_gpus=2)))  # 500 and 500
COSTS = Costs(steps_per_s=10.0, us_per_token=20.0, expert_bytes=1e6, bytes_per_us=100.0)


def decide(trigger: Trigger, now_s: float = 0.0, answer=BETTER, lifetime_s: float = 1000.0, costs=COSTS, **options):
    outlook = Outlook(RATE_LE, costs, lifetime_s, **options)
    return trigger.decide(now_s, NOW, answer.target, answer.rounds, outlook)


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


@pytest.mark.parametrize("name", ["hysteresis", "min_gain", "cooldown_s", "failure_cooldown_s", "max_lifetime_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_config_that_makes_no_sense_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        TriggerConfig(**{name: value})


# -- controller --------------------------------------------------------------------------------------------------------


class Server:
    """Counters as a server's, under a load that stays the same."""

    def __init__(self, server_id: str = "first"):
        self.server_id, self.time_s, self.steps = server_id, 50.0, 0
        self.rng = np.random.default_rng(0)
        self.tokens_PLE = np.zeros((2, 1, 5), dtype=np.int64)
        self.copied: tuple[int, float] = (0, 0.0)
        self.rate_E = RATE_LE[0]

    def work(self, seconds: float = 5.0) -> ServerSnapshot:
        self.time_s += seconds
        self.steps += int(10 * seconds)
        self.tokens_PLE[1, 0] += self.rng.poisson(self.rate_E * seconds)
        rows = int(self.tokens_PLE.sum())
        return ServerSnapshot(
            self.server_id, self.time_s, self.tokens_PLE.copy(), self.steps, 20.0 * rows, rows, 10**6, *self.copied
        )


def test_a_controller_plans_once_there_is_load_and_learns_the_costs():
    controller, server = Controller(), Server()
    assert controller.plan_request(NOW) is None and controller.costs.steps_per_s == 0
    assert not controller.observe(server.work()) and controller.plan_request(NOW) is None  # a window needs two looks
    for _ in range(12):
        controller.observe(server.work())
    server.copied = (5_000_000, 0.05)
    controller.observe(server.work())
    costs = controller.costs
    assert costs.steps_per_s == pytest.approx(10) and costs.us_per_token == pytest.approx(20)
    assert (costs.expert_bytes, costs.bytes_per_us) == (10**6, pytest.approx(100))
    request = controller.plan_request(NOW)
    np.testing.assert_allclose(request.load_LE, RATE_LE, rtol=0.1)
    answer = solve(request)
    decision = controller.decide(0.0, NOW, answer)
    assert decision.migrate and decision.after < 1.1 < decision.before
    assert decision.lifetime_steps == pytest.approx(65 * 10, rel=0.1)  # as long as it was watched
    assert controller.max_over_mean(NOW) == pytest.approx(decision.before)
    controller.migration_ended(0.0, succeeded=True)
    assert controller.decide(1.0, NOW, answer).verdict == "cooling"


def test_plans_are_made_when_they_may_bring_something_new():
    """Three windows at least; then less and less often, until the load, the speeds or the placement are others."""
    controller, server = Controller(TriggerConfig(cooldown_s=30)), Server()
    for looks in range(4):
        assert not controller.due(0.0), looks
        controller.observe(server.work())
    assert controller.due(0.0)
    answer, now_s, waits = solve(controller.plan_request(NOW)), 0.0, []
    for _ in range(6):
        controller.decide(now_s, NOW, answer)
        assert not controller.due(now_s + 1e6)  # idle ever since: the answer would be the same
        controller.observe(server.work())
        start_s = now_s
        while not controller.due(now_s):
            now_s += 1
        waits.append(now_s - start_s)
    assert waits == [5, 10, 20, 40, 60, 60]
    controller.decide(now_s, NOW, answer)
    assert not controller.set_speed(None) and not controller.set_speed(np.ones(2)) and not controller.due(now_s)
    assert controller.set_speed(np.array([0.5, 1])) and controller.due(now_s)
    np.testing.assert_array_equal(controller.plan_request(NOW).gpu_speed, [0.5, 1])
    controller.decide(now_s, NOW, answer)
    assert not controller.set_speed(np.array([0.52, 1])) and not controller.due(now_s)  # no news
    assert controller.set_speed(None) and controller.gpu_speed is None and controller.due(now_s)
    controller.migration_ended(now_s, succeeded=True)
    assert not controller.due(now_s + 29) and controller.due(now_s + 30)


def test_what_plans_promised_too_much_is_taken_off_the_next_promise():
    """The windows after a plan have another detail, too few of them to be called a change."""
    controller, server = Controller(TriggerConfig(cooldown_s=0)), Server()
    for _ in range(5):
        controller.observe(server.work())
    good = solve(controller.plan_request(NOW))
    first = controller.decide(0.0, NOW, good)
    assert first.migrate and first.after < 1.05
    controller.migration_ended(0.0, succeeded=True)
    serves = good.target
    hot = int(serves.physical_to_logical_map[0][0])  # its GPU gets 200 tokens more, so 1.17 of the mean
    server.rate_E = RATE_LE[0] + 200 * (np.arange(5) == hot)
    for _ in range(3):
        controller.observe(server.work())
    naive = Controller(TriggerConfig(cooldown_s=0))
    naive.statistics = controller.statistics
    assert controller.statistics.num_changes == 0
    controller.plan_request(serves)
    one, other = controller.decide(1.0, NOW, good), naive.decide(1.0, NOW, good)
    noise = (controller.statistics.noise(), np.sqrt(1 / 4) + np.sqrt(1 / 3))  # now; of the plan and of what it met
    assert one.after - other.after == pytest.approx(0.16 * noise[0] / noise[1], abs=0.03)
    assert one.before == other.before
    gain = (one.before - one.after) / (other.before - other.after)
    costs = controller.costs.us_per_token / naive.costs.us_per_token
    assert one.saving_us_per_step / other.saving_us_per_step == pytest.approx(gain * costs)
    assert decide(Trigger(), optimism=9.0).saving_us == 0 and not decide(Trigger(), optimism=0.59).migrate
    assert decide(Trigger(), optimism=0.3).after == pytest.approx(1.3)


def test_idle_time_does_not_count():
    controller, server = Controller(), Server()
    for _ in range(5):
        controller.observe(server.work())
    before = controller.costs.steps_per_s
    server.time_s += 3600
    controller.observe(ServerSnapshot("first", server.time_s, server.tokens_PLE.copy(), server.steps, 0.0, 0, 10**6))
    assert controller.costs.steps_per_s == before
    assert controller.statistics.lifetime_s == pytest.approx(4 * 5)


def test_after_a_restart_of_the_server_everything_begins_anew():
    controller, server = Controller(), Server()
    for _ in range(6):
        controller.observe(server.work())
    assert len(controller.statistics) == 5
    assert not controller.observe(Server("second").work())  # its counters are smaller: no negative load
    assert len(controller.statistics) == 0 and controller.plan_request(NOW) is None


def test_a_snapshot_is_read_from_what_a_server_says():
    layer = {"per_expert": [5, 7], "per_expert_prefill": [5, 1]}
    data = {"server_id": "x", "time_s": 3.5, "layers": [layer], "num_steps": 4, "expert_us": 9.5, "expert_rows": 12,
            "expert_bytes": 100, "copied_bytes": 0, "copied_s": 0.0, "num_ranks": 2}  # fmt: skip
    snapshot = ServerSnapshot.from_json(data)
    np.testing.assert_array_equal(snapshot.tokens_PLE, [[[5, 1]], [[0, 6]]])
    assert (snapshot.server_id, snapshot.time_s, snapshot.num_steps, snapshot.expert_bytes) == ("x", 3.5, 4, 100)
    for name in ("server_id", "layers", "expert_bytes"):
        with pytest.raises(ValueError, match=f"no '{name}'"):
            ServerSnapshot.from_json({k: v for k, v in data.items() if k != name})
    with pytest.raises(ValueError, match="counted no load yet"):
        ServerSnapshot.from_json({**data, "layers": []})
