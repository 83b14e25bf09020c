"""Controller: turns snapshots of a server's counters into decisions to migrate.

The same code runs in the server (--rebalance auto) and beside it (`eprt balancer`):

    controller.observe(snapshot)                    # every few seconds
    if controller.due(now_s):
        request = controller.plan_request(placement)
        answer = solve(request)                     # in any process: job.py
        decision = controller.decide(now_s, placement, answer)
        controller.migration_ended(now_s, succeeded)

Does no input or output and does not plan.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .checks import NUMBER, check_fields
from .job import PlanAnswer, PlanRequest
from .placement import Placement
from .statistics import LoadStatistics
from .trace import RoutingTrace
from .trigger import Costs, Decision, Outlook, Trigger, TriggerConfig, mean_skew

_MIN_WINDOWS = 3  # a plan for fewer windows fits their noise
# Under the same load a new plan rarely differs from the previous one, so the waits between plans double up to this.
_LONGEST_WAIT_S = 60.0
_COUNTERS = ("num_steps", "expert_us", "expert_rows", "expert_bytes", "copied_bytes", "copied_s")


class NoLoadError(ValueError):
    """The server has counted no load yet."""


@dataclass(frozen=True, eq=False)
class ServerSnapshot:
    """A server's counters since its start, at one moment."""

    server_id: str  # different after a restart
    time_s: float  # of the server's clock
    tokens_PLE: np.ndarray  # int64 [2, L, E]: choices of each expert, prefill and decode
    num_steps: int  # steps with tokens
    expert_us: float  # time of the experts of all ranks
    expert_rows: int  # rows that those experts computed
    expert_bytes: int  # weights and scales of one expert
    copied_bytes: int = 0  # sent and received by migrations, all ranks
    copied_s: float = 0.0  # time that the ranks' steps spent on those copies

    @staticmethod
    def from_json(data: dict[str, Any]) -> "ServerSnapshot":
        """Parses the answer of GET /v1/eprt/load. ValueError names a field that is missing or of another type;
        NoLoadError: no load was counted."""
        check_fields(data, "the server's load", {"server_id": str, "time_s": NUMBER, "layers": list})
        check_fields(data, "the server's load", dict.fromkeys(_COUNTERS, NUMBER))
        if not data["layers"]:
            raise NoLoadError("the server has counted no load yet: the model has no MoE layers, or is loading")
        total_LE, prefill_LE = (_counts(data["layers"], name) for name in ("per_expert", "per_expert_prefill"))
        if total_LE.shape != prefill_LE.shape:
            raise ValueError(f"the server's load has {total_LE.shape} experts in all, {prefill_LE.shape} in prefill")
        tokens_PLE = np.stack((prefill_LE, total_LE - prefill_LE))
        counters = {name: data[name] for name in _COUNTERS}
        return ServerSnapshot(data["server_id"], float(data["time_s"]), tokens_PLE, **counters)


def _counts(layers: list[Any], name: str) -> np.ndarray:
    """int64 [L, E]"""
    for layer, entry in enumerate(layers):
        if not isinstance(entry, dict) or not isinstance(entry.get(name), list):
            raise ValueError(f"layer {layer} of the server's load has no list {name!r}")
        if len(entry[name]) != len(layers[0][name]):
            raise ValueError(f"layer {layer} of the server's load has another number of experts than layer 0")
    count_LE = np.array([entry[name] for entry in layers])
    if count_LE.ndim != 2 or count_LE.dtype.kind != "i":
        raise ValueError(f"{name!r} of the server's load does not hold integers")
    return count_LE.astype(np.int64)


@dataclass
class _Prediction:
    """What the latest plan to be carried out predicts, to be compared with the load after its migration."""

    placement: Placement  # the target
    after: float  # predicted max/mean
    noise: float  # of the load that the plan was made from
    num_windows: int | None = None  # of the statistics at the end of the migration; None: it has not ended
    num_changes: int = 0  # likewise


class Controller:
    """Observes the load, says when to plan, and decides about plans.

    config: of the trigger.
    max_moves_per_layer: slots that one plan may change; default as in plan().
    """

    def __init__(self, config: TriggerConfig | None = None, max_moves_per_layer: int | None = None):
        self.trigger = Trigger(config)
        self.statistics = LoadStatistics(0, 0)
        self.gpu_speed: np.ndarray | None = None
        self._max_moves = max_moves_per_layer
        self._before: ServerSnapshot | None = None
        self._us_per_token = 1.0
        self._bytes_per_us = 1000.0
        self._expert_bytes = 0
        self._optimism: float | None = None
        self._prediction: _Prediction | None = None
        self.plan_again()

    def observe(self, snapshot: ServerSnapshot) -> bool:
        """Adds the window since the previous snapshot, or starts from zero after a restart of the server. True if the
        load has changed."""
        before, self._before = self._before, snapshot
        if before is None or before.server_id != snapshot.server_id:
            self.statistics = LoadStatistics(*snapshot.tokens_PLE.shape[1:])
            self._expert_bytes = snapshot.expert_bytes
            self._prediction = None
            self.plan_again()
            return False
        rows = snapshot.expert_rows - before.expert_rows
        if rows > 0:
            self._us_per_token = max(0.0, snapshot.expert_us - before.expert_us) / rows
        copied_bytes, copied_s = snapshot.copied_bytes - before.copied_bytes, snapshot.copied_s - before.copied_s
        if copied_bytes > 0 and copied_s > 0:
            self._bytes_per_us = copied_bytes / (copied_s * 1e6)
        seconds = snapshot.time_s - before.time_s
        if seconds <= 0:
            return False
        steps = snapshot.num_steps - before.num_steps
        tokens_PLE = snapshot.tokens_PLE - before.tokens_PLE
        changed = self.statistics.add_window(tokens_PLE, seconds, steps, snapshot.num_steps)
        self.statistics.rate()  # computed here and cached, because other threads ask for it
        if changed:
            self.plan_again()
        return changed

    def plan_again(self) -> None:
        """Circumstances have changed since the latest decision: the next plan may be made at once."""
        self._next_plan_s, self._wait_s = -np.inf, 0.0
        self._planned_window = -1  # statistics.num_windows at the latest plan; -1: need not wait for a new window

    def plan_later(self, now_s: float) -> None:
        """A plan was made or failed: the next one waits twice as long as this one did, and for a new window."""
        self._wait_s = min(2 * self._wait_s or self.statistics.current_windows[-1].seconds, _LONGEST_WAIT_S)
        self._next_plan_s, self._planned_window = now_s + self._wait_s, self.statistics.num_windows

    @property
    def costs(self) -> Costs:
        return Costs(self.statistics.steps_per_s, self._us_per_token, self._expert_bytes, self._bytes_per_us)

    def max_over_mean(self, placement: Placement) -> float | None:
        """The busiest GPU's time over the mean under the recent load, averaged over layers; None: no load yet."""
        rate_LE = self.statistics.rate()
        return None if rate_LE is None else mean_skew(placement, rate_LE, self.gpu_speed)

    def due(self, now_s: float) -> bool:
        """Whether it is time for a new plan."""
        if len(self.statistics.current_windows) < _MIN_WINDOWS or self.statistics.num_windows == self._planned_window:
            return False
        return now_s >= self._next_plan_s and self.trigger.cooldown_left_s(now_s) == 0

    def set_speed(self, gpu_speed: np.ndarray | None) -> bool:
        """The speed of each GPU, as in plan(); None: all equal. True if it was set: changes within 10 % are ignored."""
        old, new = (None if s is None or np.all(s == 1) else np.asarray(s) for s in (self.gpu_speed, gpu_speed))
        if (old is None and new is None) or (old is not None and new is not None and np.allclose(old, new, rtol=0.1)):
            return False
        self.gpu_speed = new
        self.plan_again()
        return True

    def plan_request(self, placement: Placement, trace: RoutingTrace | None = None) -> PlanRequest | None:
        """What to plan next; None if there is no measurement since the latest change. trace: a routing sample, for
        plans that save traffic between nodes."""
        rate_LE = self.statistics.rate()
        if rate_LE is None:
            return None
        self._measure_optimism(placement)
        speed_G, max_moves = self.gpu_speed, self._max_moves
        return PlanRequest(placement, load_LE=rate_LE, max_moves_per_layer=max_moves, gpu_speed=speed_G, trace=trace)

    def decide(self, now_s: float, placement: Placement, answer: PlanAnswer) -> Decision:
        """answer: to a plan_request() of this controller."""
        rate_LE = self.statistics.rate()
        assert rate_LE is not None
        noise = self.statistics.noise()
        optimism = (self._optimism or 0.0) * noise
        outlook = Outlook(rate_LE, self.costs, self.statistics.lifetime_s, self.gpu_speed, optimism)
        self.plan_later(now_s)
        decision = self.trigger.decide(now_s, placement, answer.target, answer.rounds, outlook)
        if decision.migrate:
            self._prediction = _Prediction(answer.target, mean_skew(answer.target, rate_LE, self.gpu_speed), noise)
        return decision

    def _measure_optimism(self, placement: Placement) -> None:
        """Measures how much a plan over-estimated its gain, because it also fits the noise of its windows.
        Normalised to one window: averaging more windows reduces the over-estimate."""
        prediction, statistics = self._prediction, self.statistics
        if prediction is None or prediction.num_windows is None:
            return
        since = statistics.num_windows - prediction.num_windows
        if since < _MIN_WINDOWS:
            return
        self._prediction = None
        rate_LE = statistics.rate(last=since)
        serves = np.array_equal(placement.physical_to_logical_map, prediction.placement.physical_to_logical_map)
        if statistics.num_changes > prediction.num_changes or rate_LE is None or not serves:
            return  # the load or the placement is not the one that the plan was made for
        excess = max(0.0, mean_skew(placement, rate_LE, self.gpu_speed) - prediction.after)
        excess /= prediction.noise + statistics.noise(since)  # the windows since then have noise too
        self._optimism = excess if self._optimism is None else (self._optimism + excess) / 2

    def migration_ended(self, now_s: float, succeeded: bool) -> None:
        """The migration that followed a decision has ended."""
        self.trigger.migration_ended(now_s, succeeded)
        self.plan_again()
        if not succeeded:
            self._prediction = None
        elif self._prediction is not None:
            self._prediction.num_windows = self.statistics.num_windows
            self._prediction.num_changes = self.statistics.num_changes
