"""Controller: from looks at a server's counters to decisions. The same in the server (--rebalance auto) and beside it
(`eprt balancer`). Does no input or output, and leaves the planning itself to whoever owns a process to spare.

    controller.observe(snapshot)              # every few seconds
    if controller.due(now_s):
        request = controller.request(placement)
        answer = solve(request)               # anywhere: job.py
        decision = controller.decide(now_s, placement, answer)
        controller.ended(now_s, succeeded)    # once the migration that followed has
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .job import PlanAnswer, PlanRequest
from .placement import Placement
from .statistics import LoadStatistics
from .trace import RoutingTrace
from .trigger import Costs, Decision, Outlook, Trigger, TriggerConfig, skew

_MIN_WINDOWS = 3  # a plan for fewer fits their noise
# An answer under the same load will hardly be another one soon: the waits between plans double up to this.
_LONGEST_WAIT_S = 60.0
_COUNTERS = ("num_steps", "expert_us", "expert_rows", "expert_bytes", "copied_bytes", "copied_s")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A server's counters, all since its start. server_id: another one after a restart. time_s: of its clock.

    tokens_PLE: int64 [2, L, E], choices of each expert, prefill and decode. num_steps: computing ones.
    expert_us, expert_rows: time that the experts of all ranks took, and the rows they were given. copied_bytes,
    copied_s: what migrations sent and took in on all ranks, and the time that the ranks' steps spent on it.
    """

    server_id: str
    time_s: float
    tokens_PLE: np.ndarray
    num_steps: int
    expert_us: float
    expert_rows: int
    expert_bytes: int
    copied_bytes: int = 0
    copied_s: float = 0.0

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Snapshot":
        """What GET /v1/eprt/load answers. ValueError naming the field that is missing, or that no load was counted."""
        missing = {"server_id", "time_s", "layers", *_COUNTERS} - set(data)
        if missing:
            raise ValueError(f"the server's load has no {min(missing)!r}: is it an eprt server of this version?")
        if not data["layers"]:
            raise ValueError("the server has counted no load yet: the model has no MoE layers, or is loading")
        total_LE = np.array([layer["per_expert"] for layer in data["layers"]], dtype=np.int64)
        prefill_LE = np.array([layer["per_expert_prefill"] for layer in data["layers"]], dtype=np.int64)
        return Snapshot(
            data["server_id"],
            float(data["time_s"]),
            np.stack((prefill_LE, total_LE - prefill_LE)),
            **{name: data[name] for name in _COUNTERS},
        )


@dataclass
class _Promise:
    """Of the latest plan worth carrying out: what it leads to, its max/mean, the noise of the load it is made from; and
    where the statistics stood when a migration had ended after it."""

    placement: Placement
    after: float
    noise: float
    num_windows: int | None = None
    num_changes: int = 0


class Controller:
    """config: of the trigger. max_moves_per_layer: slots that one plan may change; None: the planner's default."""

    def __init__(self, config: TriggerConfig | None = None, max_moves_per_layer: int | None = None):
        self.trigger = Trigger(config)
        self.statistics: LoadStatistics | None = None
        self.gpu_speed: np.ndarray | None = None
        self._max_moves = max_moves_per_layer
        self._before: Snapshot | None = None
        self._us_per_token = 1.0
        self._bytes_per_us = 1000.0
        self._expert_bytes = 0
        self._optimism: float | None = None
        self._promise: _Promise | None = None
        self.plan_again()

    def observe(self, snapshot: Snapshot) -> bool:
        """Takes in a look at the counters; the time since the one before is a window. True if the load has changed.

        After a restart of the server everything begins anew.
        """
        before, self._before = self._before, snapshot
        if self.statistics is None or before is None or before.server_id != snapshot.server_id:
            self.statistics = LoadStatistics(*snapshot.tokens_PLE.shape[1:])
            self._expert_bytes = snapshot.expert_bytes
            self._promise = None
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
        changed = self.statistics.add(tokens_PLE, seconds, steps, snapshot.num_steps)
        self.statistics.rate()  # worked out here, for whoever asks until the next window
        if changed:
            self.plan_again()
        return changed

    def plan_again(self) -> None:
        """Something is not as it was at the latest decision: the next may be taken at once."""
        self._next_plan_s, self._wait_s = -np.inf, 0.0
        self._planned_window = -1  # the latest one at that decision

    def plan_later(self, now_s: float) -> None:
        """A plan was made, or failed: the next waits twice as long as this one did, and for a window besides."""
        assert self.statistics is not None
        self._wait_s = min(2 * self._wait_s or self.statistics.current[-1].seconds, _LONGEST_WAIT_S)
        self._next_plan_s, self._planned_window = now_s + self._wait_s, self.statistics.num_windows

    @property
    def costs(self) -> Costs:
        steps_per_s = 0.0 if self.statistics is None else self.statistics.steps_per_s
        return Costs(steps_per_s, self._us_per_token, self._expert_bytes, self._bytes_per_us)

    def balance(self, placement: Placement) -> float | None:
        """The busiest GPU's time over the mean under the recent load, averaged over layers; None: no load yet."""
        rate_LE = None if self.statistics is None else self.statistics.rate()
        return None if rate_LE is None else skew(placement, rate_LE, self.gpu_speed)

    def due(self, now_s: float) -> bool:
        """Whether a plan might now bring another answer than the one before."""
        statistics = self.statistics
        if (
            statistics is None
            or len(statistics.current) < _MIN_WINDOWS
            or statistics.num_windows == self._planned_window
        ):
            return False
        return now_s >= self._next_plan_s and self.trigger.cooling_s(now_s) == 0

    def set_speed(self, gpu_speed: np.ndarray | None) -> bool:
        """How fast each GPU is, as in plan(); None: all alike. True if it is news."""
        old, new = (None if s is None or np.all(s == 1) else np.asarray(s) for s in (self.gpu_speed, gpu_speed))
        if (old is None and new is None) or (old is not None and new is not None and np.allclose(old, new, rtol=0.1)):
            return False
        self.gpu_speed = new
        self.plan_again()
        return True

    def request(self, placement: Placement, trace: RoutingTrace | None = None) -> PlanRequest | None:
        """What to plan next; None while nothing has been measured since the latest change.

        trace: routing sample, for plans that save traffic between nodes.
        """
        rate_LE = None if self.statistics is None else self.statistics.rate()
        if rate_LE is None:
            return None
        self._hold_to_promise(placement)
        return PlanRequest(
            placement, load_LE=rate_LE, max_moves_per_layer=self._max_moves, gpu_speed=self.gpu_speed, trace=trace
        )

    def decide(self, now_s: float, placement: Placement, answer: PlanAnswer) -> Decision:
        """answer: to a request() of this controller."""
        assert self.statistics is not None
        rate_LE = self.statistics.rate()
        assert rate_LE is not None
        noise = self.statistics.noise()
        optimism = (self._optimism or 0.0) * noise
        outlook = Outlook(rate_LE, self.costs, self.statistics.lifetime_s, self.gpu_speed, optimism)
        self.plan_later(now_s)
        decision = self.trigger.decide(now_s, placement, answer.target, answer.rounds, outlook)
        if decision.migrate:
            self._promise = _Promise(answer.target, skew(answer.target, rate_LE, self.gpu_speed), noise)
        return decision

    def _hold_to_promise(self, placement: Placement) -> None:
        """A plan fits the noise of its windows too, so it promises too much: by how much, the windows after it tell.

        _optimism is that for the noise of one window; a plan from more windows promises less too much.
        """
        promise, statistics = self._promise, self.statistics
        if promise is None or promise.num_windows is None or statistics is None:
            return
        since = statistics.num_windows - promise.num_windows
        if since < _MIN_WINDOWS:
            return
        self._promise = None
        rate_LE = statistics.rate(last=since)
        serves = np.array_equal(placement.physical_to_logical_map, promise.placement.physical_to_logical_map)
        if statistics.num_changes > promise.num_changes or rate_LE is None or not serves:
            return  # another load, or another placement: no fault of the plan's
        too_much = max(0.0, skew(placement, rate_LE, self.gpu_speed) - promise.after)
        too_much /= promise.noise + statistics.noise(since)  # those windows have noise of their own
        self._optimism = too_much if self._optimism is None else (self._optimism + too_much) / 2

    def ended(self, now_s: float, succeeded: bool) -> None:
        """The migration that followed has ended."""
        self.trigger.ended(now_s, succeeded)
        self.plan_again()
        if not succeeded or self.statistics is None:
            self._promise = None
        elif self._promise is not None:
            self._promise.num_windows = self.statistics.num_windows
            self._promise.num_changes = self.statistics.num_changes
