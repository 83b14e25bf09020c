"""Controller: from a server's counters to a decision."""

import numpy as np
import pytest
from eprt.balancer.controller import Controller, ServerSnapshot
from eprt.balancer.job import solve
from eprt.balancer.trigger import TriggerConfig

from tests.unit.balancer.cases import NOW, RATE_LE


class CountingServer:
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
    controller, server = Controller(), CountingServer()
    assert controller.plan_request(NOW) is None and controller.costs.steps_per_s == 0
    assert not controller.observe(server.work()) and controller.plan_request(NOW) is None  # a window needs two polls
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
    controller, server = Controller(TriggerConfig(cooldown_s=30)), CountingServer()
    for polls in range(4):
        assert not controller.due(0.0), polls
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


def test_what_plans_over_estimated_is_taken_off_the_next_estimate():
    """The windows after a plan have another detail, too few of them to be called a change."""
    controller, server = Controller(TriggerConfig(cooldown_s=0)), CountingServer()
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


def test_idle_time_does_not_count():
    controller, server = Controller(), CountingServer()
    for _ in range(5):
        controller.observe(server.work())
    before = controller.costs.steps_per_s
    server.time_s += 3600
    controller.observe(ServerSnapshot("first", server.time_s, server.tokens_PLE.copy(), server.steps, 0.0, 0, 10**6))
    assert controller.costs.steps_per_s == before
    assert controller.statistics.lifetime_s == pytest.approx(4 * 5)


def test_after_a_restart_of_the_server_everything_begins_anew():
    controller, server = Controller(), CountingServer()
    for _ in range(6):
        controller.observe(server.work())
    assert len(controller.statistics) == 5
    assert not controller.observe(CountingServer("second").work())  # its counters are smaller: no negative load
    assert len(controller.statistics) == 0 and controller.plan_request(NOW) is None


def test_a_snapshot_is_read_from_what_a_server_says():
    layer = {"per_expert": [5, 7], "per_expert_prefill": [5, 1]}
    counters = {"num_steps": 4, "expert_us": 9.5, "expert_rows": 12, "expert_bytes": 100}
    counters |= {"copied_bytes": 0, "copied_s": 0.0}
    data = {"server_id": "x", "time_s": 3.5, "layers": [layer], "num_ranks": 2, **counters}
    snapshot = ServerSnapshot.from_json(data)
    np.testing.assert_array_equal(snapshot.tokens_PLE, [[[5, 1]], [[0, 6]]])
    assert (snapshot.server_id, snapshot.time_s, snapshot.num_steps, snapshot.expert_bytes) == ("x", 3.5, 4, 100)
    for name in ("server_id", "layers", "expert_bytes"):
        with pytest.raises(ValueError, match=f"no '{name}'"):
            ServerSnapshot.from_json({k: v for k, v in data.items() if k != name})
    with pytest.raises(ValueError, match="counted no load yet"):
        ServerSnapshot.from_json({**data, "layers": []})
