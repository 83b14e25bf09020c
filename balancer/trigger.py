"""Trigger: decides whether a new placement is worth its migration, and logs each decision.

    saving  (busiest rank's tokens now - planned) summed over layers, per step, x us per token
            + (crossings between nodes now - planned) of a rank's tokens, per step, x us per crossing   [us per step]
            x steps of the expected lifetime of the plan
    cost    bytes that the busiest rank sends and receives / speed of copying                    [us]

The expected lifetime is measured: LoadStatistics.lifetime_s. It is short after a start and after a change of the load,
so the first decisions are "keep" unless the saving is large. The trigger only does arithmetic on measured values; it
does not know how they are measured, or how a migration is carried out.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .migration import Round
from .placement import Placement

_log = logging.getLogger(__name__)

VERDICTS = ("migrate", "dry_run", "keep", "cooling")


@dataclass(frozen=True)
class TriggerConfig:
    """When a migration is worthwhile."""

    hysteresis: float = 1.5  # the saving must be at least this many times the cost
    # The busiest rank's load must fall by this fraction of the mean load, or the crossings between nodes by this
    # fraction.
    min_gain: float = 0.02
    # Time that a rank's network takes for one token to another node and back; 0: only balance counts. The default is
    # that of DeepSeek-V3 (7 KB in fp8, 14 KB in bf16) at 400 Gb/s.
    us_per_crossing: float = 0.4
    cooldown_s: float = 30.0  # pause after a migration
    failure_cooldown_s: float = 60.0  # pause after a failed migration, doubled with each further failure in a row
    max_lifetime_s: float = 3600.0  # upper limit of the expected lifetime of a plan
    dry_run: bool = False  # decide, but never migrate

    def __post_init__(self):
        """ValueError names the field."""
        for name in ("hysteresis", "min_gain", "us_per_crossing", "cooldown_s", "failure_cooldown_s", "max_lifetime_s"):
            value = getattr(self, name)
            if not 0 <= value < np.inf:
                raise ValueError(f"{name}={value!r}: must be finite and at least 0")


@dataclass(frozen=True)
class Costs:
    """Measured costs of a server."""

    steps_per_s: float  # under its present load
    us_per_token: float  # time of a rank's experts for one token's choice of an expert
    expert_bytes: float  # weights and scales of one expert
    bytes_per_us: float = 1000.0  # speed at which a rank copies experts during a migration


@dataclass(frozen=True, eq=False)
class Outlook:
    """What a plan is judged by."""

    rate_LE: np.ndarray  # float64 [L, E]: tokens per second
    costs: Costs
    lifetime_s: float  # how long a plan is expected to be useful
    gpu_speed: np.ndarray | None = None  # [G] as in plan(); None: all equal
    optimism: float = 0.0  # expected over-estimate of a plan: how much higher max/mean turns out than planned


@dataclass(frozen=True)
class Decision:
    """What the trigger decided about a plan, and why."""

    verdict: str  # one of VERDICTS; "dry_run": it would migrate
    reason: str  # one sentence
    before: float  # busiest rank's load over the mean, averaged over layers: now
    after: float  # the same under the plan
    saving_us_per_step: float
    lifetime_steps: float  # steps during which the plan is expected to be useful
    saving_us: float
    cost_us: float
    moved_experts: int
    moved_bytes: float
    crossings_before: float | None = None  # between nodes, per token and layer; None: the plan did not count them
    crossings_after: float | None = None
    traffic_us_per_step: float = 0.0  # the part of saving_us_per_step that crossings save

    @property
    def migrate(self) -> bool:
        return self.verdict == "migrate"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        crossings = ""
        if self.crossings_before is not None:
            crossings = f"crossings/token {self.crossings_before:.3f} -> {self.crossings_after:.3f}, "
        return (
            f"{self.verdict}: {self.reason} (max/mean {self.before:.3f} -> {self.after:.3f}, {crossings}saves "
            f"{self.saving_us_per_step:.1f} us/step x {self.lifetime_steps:.0f} steps = {self.saving_us / 1e3:.1f} ms, "
            f"costs {self.cost_us / 1e3:.1f} ms for {self.moved_experts} experts, {self.moved_bytes / 1e6:.2f} MB)"
        )


class Trigger:
    """Its only state is when the latest migrations ended, and how."""

    def __init__(self, config: TriggerConfig | None = None):
        self.config = config or TriggerConfig()
        self._cooldown_until_s = -np.inf
        self._num_failed = 0

    def cooldown_left_s(self, now_s: float) -> float:
        """Seconds until the next decision may be to migrate."""
        return max(0.0, self._cooldown_until_s - now_s)

    def migration_ended(self, now_s: float, succeeded: bool) -> None:
        """Starts the pause after a migration."""
        self._num_failed = 0 if succeeded else self._num_failed + 1
        config = self.config
        wait_s = config.cooldown_s if succeeded else config.failure_cooldown_s * 2 ** min(self._num_failed - 1, 6)
        self._cooldown_until_s = now_s + wait_s

    def decide(
        self, now_s: float, current: Placement, planned: Placement, rounds: Sequence[Round], outlook: Outlook
    ) -> Decision:
        """Whether to migrate from current to planned by these rounds. Crossings are taken from planned.metrics; a plan
        that was made without a routing trace has none."""
        costs = outlook.costs
        before, after, balance_us_per_step = _balance_saving(current, planned, outlook)
        traffic = _traffic_saving(planned, outlook)
        traffic_us_per_step = traffic.saved_per_step * self.config.us_per_crossing
        saving_us_per_step = balance_us_per_step + traffic_us_per_step
        lifetime_steps = min(outlook.lifetime_s, self.config.max_lifetime_s) * costs.steps_per_s
        saving_us = saving_us_per_step * lifetime_steps
        moved, busiest = _count_copies(rounds, current.num_gpus)
        cost_us = busiest * costs.expert_bytes / costs.bytes_per_us
        verdict, reason = self._verdict(now_s, before - after, traffic, saving_us, cost_us)
        decision = Decision(
            verdict=verdict,
            reason=reason,
            before=before,
            after=after,
            saving_us_per_step=saving_us_per_step,
            lifetime_steps=lifetime_steps,
            saving_us=saving_us,
            cost_us=cost_us,
            moved_experts=moved,
            moved_bytes=moved * costs.expert_bytes,
            crossings_before=traffic.before,
            crossings_after=traffic.after,
            traffic_us_per_step=traffic_us_per_step,
        )
        _log.info("rebalance %s", decision)
        return decision

    def _verdict(
        self, now_s: float, gain: float, traffic: "_TrafficSaving", saving_us: float, cost_us: float
    ) -> tuple[str, str]:
        config = self.config
        saved = traffic.saved_fraction if config.us_per_crossing else 0.0
        if max(gain, saved) < config.min_gain:
            crossings = "" if traffic.before is None else f" and {saved:.1%} of the crossings would be saved"
            loses = f"the busiest rank would lose {gain:.1%} of the mean load{crossings}"
            return "keep", f"{loses}, less than {config.min_gain:.1%}"
        if saving_us < config.hysteresis * cost_us:
            return "keep", f"the saving is less than {config.hysteresis:g} times the cost"
        if (left_s := self.cooldown_left_s(now_s)) > 0:
            return "cooling", f"worth it, but the latest migration was too recent: {left_s:.0f} s to wait"
        if config.dry_run:
            return "dry_run", "worth it; dry run"
        return "migrate", "worth it"


def _balance_saving(current: Placement, planned: Placement, outlook: Outlook) -> tuple[float, float, float]:
    """(max/mean before, after, us per step that the busiest rank saves in all layers)."""
    costs, speed_G = outlook.costs, _speeds(outlook.gpu_speed, current.num_gpus)
    now_LG, then_LG = (_gpu_times(p.gpu_load(outlook.rate_LE), speed_G) for p in (current, planned))
    before, predicted = (mean_skew(p, outlook.rate_LE, speed_G) for p in (current, planned))
    after = min(predicted + outlook.optimism, max(before, predicted))
    tokens_per_step = float((now_LG.max(1) - then_LG.max(1)).sum()) / max(costs.steps_per_s, 1e-9)
    saved_us_per_step = tokens_per_step * costs.us_per_token
    if before > predicted:
        saved_us_per_step *= max(before - after, 0.0) / (before - predicted)
    return before, after, saved_us_per_step


@dataclass(frozen=True)
class _TrafficSaving:
    """What fewer crossings between nodes save."""

    before: float | None = None  # crossings per token and layer; None: not counted
    after: float | None = None
    saved_per_step: float = 0.0  # crossings of one rank's tokens, in all layers

    @property
    def saved_fraction(self) -> float:
        return 1 - self.after / self.before if self.before and self.after is not None else 0.0


def _traffic_saving(planned: Placement, outlook: Outlook) -> _TrafficSaving:
    metrics = planned.metrics
    if "traffic_per_token_before" not in metrics:
        return _TrafficSaving()
    before, after = float(metrics["traffic_per_token_before"]), float(metrics["traffic_per_token"])
    tokens_per_s = float(outlook.rate_LE.sum()) / metrics["choices_per_token"]  # of all layers
    tokens_per_step = tokens_per_s / max(outlook.costs.steps_per_s, 1e-9)
    return _TrafficSaving(before, after, (before - after) * tokens_per_step / planned.num_gpus)


def mean_skew(placement: Placement, rate_LE: np.ndarray, gpu_speed: np.ndarray | None = None) -> float:
    """The busiest GPU's time over the mean, averaged over layers; 1.0 is even."""
    speed_G = _speeds(gpu_speed, placement.num_gpus)
    mean_L = np.maximum(rate_LE.sum(1) / speed_G.sum(), 1e-12)
    return float((_gpu_times(placement.gpu_load(rate_LE), speed_G).max(1) / mean_L).mean())


def _speeds(gpu_speed: np.ndarray | None, num_gpus: int) -> np.ndarray:
    return np.ones(num_gpus) if gpu_speed is None else np.asarray(gpu_speed, dtype=np.float64)


def _gpu_times(load_LG: np.ndarray, speed_G: np.ndarray) -> np.ndarray:
    """Load over speed. Load on a masked GPU (speed 0) takes practically forever."""
    return load_LG / np.maximum(speed_G, 1e-6)


def _count_copies(rounds: Sequence[Round], num_gpus: int) -> tuple[int, int]:
    """(experts that all GPUs receive, experts that the busiest GPU sends and receives)."""
    sent_G, received_G = np.zeros((2, num_gpus), dtype=np.int64)
    for stream in (stream for one in rounds for wave in one.waves for stream in wave):
        sent_G[stream.source] += 1
        received_G[list(stream.readers)] += 1
    return int(received_G.sum()), int((sent_G + received_G).max())
