"""Trigger: whether a new placement is worth its migration. Pure arithmetic on what was measured; logs each decision.

    saving  (busiest rank's tokens now - planned) summed over layers, per step, x us per token
            + (crossings between nodes now - planned) of a rank's tokens, per step, x us per crossing   [us per step]
            x steps of the expected lifetime of the plan
    cost    bytes that the busiest rank sends and receives / speed of copying                    [us]

The expected lifetime is measured: LoadStatistics.lifetime_s. What is not known to last is not worth moving for, so the
first decisions after a start, or after a change, say "keep" unless the saving is large.
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
    """hysteresis: the saving must be so many times the cost. min_gain: and the busiest rank's load must fall by this
    fraction of the mean load, or the crossings between nodes by this fraction of them. us_per_crossing: what a rank's
    network takes for one token to one other node, there and back; the default is that of DeepSeek-V3 (7 KB in fp8,
    14 KB in bf16) at 400 Gb/s. cooldown_s: pause after a migration; after a failed one failure_cooldown_s, doubled with
    each failure in a row. max_lifetime_s: however long the load seems to last. dry_run: decide only.
    """

    hysteresis: float = 1.5
    min_gain: float = 0.02
    us_per_crossing: float = 0.4
    cooldown_s: float = 30.0
    failure_cooldown_s: float = 60.0
    max_lifetime_s: float = 3600.0
    dry_run: bool = False

    def __post_init__(self):
        """ValueError names the field."""
        for name in ("hysteresis", "min_gain", "us_per_crossing", "cooldown_s", "failure_cooldown_s", "max_lifetime_s"):
            value = getattr(self, name)
            if not 0 <= value < np.inf:
                raise ValueError(f"{name}={value!r}: must be finite and at least 0")


@dataclass(frozen=True)
class Costs:
    """steps_per_s: of the server under its load. us_per_token: time a rank's experts take for one token's choice of an
    expert. expert_bytes: weights and scales of one expert. bytes_per_us: what a rank copies while it moves experts."""

    steps_per_s: float
    us_per_token: float
    expert_bytes: float
    bytes_per_us: float = 1000.0


@dataclass(frozen=True, eq=False)
class Outlook:
    """What a plan is judged by. rate_LE: float64 [L, E], tokens per second. lifetime_s: how long a plan is expected to
    be worth something. gpu_speed: [G] as in plan(); None: all alike. optimism: how much higher than promised max/mean
    came out before."""

    rate_LE: np.ndarray
    costs: Costs
    lifetime_s: float
    gpu_speed: np.ndarray | None = None
    optimism: float = 0.0


@dataclass(frozen=True)
class Decision:
    """verdict: one of VERDICTS; "dry_run": it would migrate. before, after: busiest rank's load over the mean,
    averaged over layers. reason: one sentence. Times in us. crossings_before, crossings_after: between nodes, per token
    and layer, where the plan looked at them; traffic_us_per_step: their part of saving_us_per_step."""

    verdict: str
    reason: str
    before: float
    after: float
    saving_us_per_step: float
    lifetime_steps: float
    saving_us: float
    cost_us: float
    moved_experts: int
    moved_bytes: float
    crossings_before: float | None = None
    crossings_after: float | None = None
    traffic_us_per_step: float = 0.0

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
    """State: when the latest migrations ended and how."""

    def __init__(self, config: TriggerConfig | None = None):
        self.config = config or TriggerConfig()
        self._quiet_until_s = -np.inf
        self._num_failed = 0

    def cooling_s(self, now_s: float) -> float:
        """Seconds until the next decision may be to migrate."""
        return max(0.0, self._quiet_until_s - now_s)

    def ended(self, now_s: float, succeeded: bool) -> None:
        """A migration has ended."""
        self._num_failed = 0 if succeeded else self._num_failed + 1
        config = self.config
        wait_s = config.cooldown_s if succeeded else config.failure_cooldown_s * 2 ** min(self._num_failed - 1, 6)
        self._quiet_until_s = now_s + wait_s

    def decide(
        self, now_s: float, current: Placement, planned: Placement, rounds: Sequence[Round], outlook: Outlook
    ) -> Decision:
        """rounds: the migration from current to planned. What crosses between nodes is what planned.metrics say, where
        the plan was made with a routing trace."""
        costs = outlook.costs
        balance = _balance(current, planned, outlook)
        traffic = _traffic(planned, outlook)
        traffic_us_per_step = traffic.saved_per_step * self.config.us_per_crossing
        saving_us_per_step = balance.saved_us_per_step + traffic_us_per_step
        lifetime_steps = min(outlook.lifetime_s, self.config.max_lifetime_s) * costs.steps_per_s
        saving_us = saving_us_per_step * lifetime_steps
        moved, busiest = _copies(rounds, current.num_gpus)
        cost_us = busiest * costs.expert_bytes / costs.bytes_per_us
        verdict, reason = self._verdict(now_s, balance.before - balance.after, traffic, saving_us, cost_us)
        decision = Decision(
            verdict=verdict,
            reason=reason,
            before=balance.before,
            after=balance.after,
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
        self, now_s: float, gain: float, traffic: "_Traffic", saving_us: float, cost_us: float
    ) -> tuple[str, str]:
        config = self.config
        fewer = traffic.fewer if config.us_per_crossing else 0.0
        if max(gain, fewer) < config.min_gain:
            crossings = "" if traffic.before is None else f" and {fewer:.1%} of the crossings would be saved"
            loses = f"the busiest rank would lose {gain:.1%} of the mean load{crossings}"
            return "keep", f"{loses}, less than {config.min_gain:.1%}"
        if saving_us < config.hysteresis * cost_us:
            return "keep", f"the saving is less than {config.hysteresis:g} times the cost"
        if (left_s := self.cooling_s(now_s)) > 0:
            return "cooling", f"worth it, but the latest migration was too recent: {left_s:.0f} s to wait"
        if config.dry_run:
            return "dry_run", "worth it; dry run"
        return "migrate", "worth it"


@dataclass(frozen=True)
class _Balance:
    """before, after: max over mean, as in Decision. saved_us_per_step: of the busiest rank, in all layers."""

    before: float
    after: float
    saved_us_per_step: float


def _balance(current: Placement, planned: Placement, outlook: Outlook) -> _Balance:
    costs, speed_G = outlook.costs, _speeds(outlook.gpu_speed, current.num_gpus)
    now_LG, then_LG = (_times(p.gpu_load(outlook.rate_LE), speed_G) for p in (current, planned))
    before, promised = (skew(p, outlook.rate_LE, speed_G) for p in (current, planned))
    after = min(promised + outlook.optimism, max(before, promised))
    tokens_per_step = float((now_LG.max(1) - then_LG.max(1)).sum()) / max(costs.steps_per_s, 1e-9)
    saved_us_per_step = tokens_per_step * costs.us_per_token
    if before > promised:
        saved_us_per_step *= max(before - after, 0.0) / (before - promised)
    return _Balance(before, after, saved_us_per_step)


@dataclass(frozen=True)
class _Traffic:
    """Crossings between nodes per token and layer, None where they are not known. saved_per_step: of one rank's tokens,
    in all layers."""

    before: float | None = None
    after: float | None = None
    saved_per_step: float = 0.0

    @property
    def fewer(self) -> float:
        return 1 - self.after / self.before if self.before and self.after is not None else 0.0


def _traffic(planned: Placement, outlook: Outlook) -> _Traffic:
    metrics = planned.metrics
    if "traffic_per_token_before" not in metrics:
        return _Traffic()
    before, after = float(metrics["traffic_per_token_before"]), float(metrics["traffic_per_token"])
    tokens_per_s = float(outlook.rate_LE.sum()) / metrics["choices_per_token"]  # of all layers
    tokens_per_step = tokens_per_s / max(outlook.costs.steps_per_s, 1e-9)
    return _Traffic(before, after, (before - after) * tokens_per_step / planned.num_gpus)


def skew(placement: Placement, rate_LE: np.ndarray, gpu_speed: np.ndarray | None = None) -> float:
    """The busiest GPU's time over the mean, averaged over layers; 1.0 is even."""
    speed_G = _speeds(gpu_speed, placement.num_gpus)
    mean_L = np.maximum(rate_LE.sum(1) / speed_G.sum(), 1e-12)
    return float((_times(placement.gpu_load(rate_LE), speed_G).max(1) / mean_L).mean())


def _speeds(gpu_speed: np.ndarray | None, num_gpus: int) -> np.ndarray:
    return np.ones(num_gpus) if gpu_speed is None else np.asarray(gpu_speed, dtype=np.float64)


def _times(load_LG: np.ndarray, speed_G: np.ndarray) -> np.ndarray:
    """Load over speed; what lies on a masked GPU (speed 0) takes for ever, as far as a plan is concerned."""
    return load_LG / np.maximum(speed_G, 1e-6)


def _copies(rounds: Sequence[Round], num_gpus: int) -> tuple[int, int]:
    """Experts that GPUs take in, and how many the busiest GPU sends and takes in."""
    sent_G, taken_G = np.zeros((2, num_gpus), dtype=np.int64)
    for stream in (stream for one in rounds for wave in one.waves for stream in wave):
        sent_G[stream.source] += 1
        np.add.at(taken_G, list(stream.readers), 1)
    return int(taken_G.sum()), int((sent_G + taken_G).max())
