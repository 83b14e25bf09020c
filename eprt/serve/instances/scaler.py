"""Scaler: looks at a server's instances window by window, and starts or retires one where the planner says so.

With --scale advise it only says what it would do: in the log, in /metrics and in GET /v1/eprt/instances. Knows nothing
of the rule (planner.py), nor of how an instance is started (starter.py).
"""

import asyncio
import logging
import math
import time
from dataclasses import dataclass, field

from eprt.serve.errors import ApiError
from eprt.serve.instances.fleet import Fleet
from eprt.serve.instances.instance import Instance
from eprt.serve.instances.planner import RolePlan, RoleState, RoleWindow, ScaleRule, changed, plan_role
from eprt.serve.options import ROLES, ServeOptions

_log = logging.getLogger(__name__)

_DEFAULT_TARGET_S = (1.5, 0.05)
_PERCENTILE = 0.9


@dataclass(slots=True)
class RoleScale:
    """One role: its rule, and what the planner said last."""

    rule: ScaleRule
    state: RoleState = field(default_factory=RoleState)
    plan: RolePlan | None = None  # of the latest window
    window: RoleWindow | None = None  # the latest
    num_started: int = 0
    num_retired: int = 0

    @property
    def wanted(self) -> int:
        """Instances; those that are there where nothing should change."""
        if self.plan is None or self.window is None:
            return 0
        return self.window.num_ready + self.window.num_changing + self.plan.change


def make_rules(options: ServeOptions) -> dict[str, ScaleRule]:
    """By role; a role without instances at the start is planned only where its numbers are given."""
    target_s = options.scale_target
    if target_s is None:
        target_s = (options.tiers[0].ttft_s, options.tiers[0].itl_s) if options.tiers else _DEFAULT_TARGET_S
    rules = {}
    for role, num, given, seconds in (
        ("prefill", options.num_prefill, options.scale_prefill, target_s[0]),
        ("decode", options.num_decode, options.scale_decode, target_s[1]),
    ):
        if num or given:
            least, most = given or (1, 2 * num)
            rules[role] = ScaleRule(least, most, seconds, options.scale_cooldown_s)
    return rules


class Scaler:
    """Of one server."""

    def __init__(self, fleet: Fleet, options: ServeOptions):
        self._fleet, self._options, self.mode = fleet, options, options.scale
        self.roles = {role: RoleScale(rule) for role, rule in make_rules(options).items()}
        fleet.on_prediction, fleet.scale_document = self._add_prediction, self.document
        self._predictions: dict[str, list[tuple[float, float]]] = {role: [] for role in ROLES}
        self._told: dict[str, int] = {}  # by role: the change that was advised last

    def _add_prediction(self, instance: Instance, first_token_s: float, alone_s: float) -> None:
        self._predictions[instance.role].append((first_token_s, alone_s))

    async def run(self) -> None:
        """Ends only by cancellation."""
        await self._fleet.ready.wait()
        while True:
            await asyncio.sleep(self._options.scale_window_s)
            if self._fleet.state == "serving":
                await self.look(time.monotonic())

    async def look(self, now_s: float) -> None:
        """A window has ended."""
        for role, scale in self.roles.items():
            scale.window = self._window(role, scale.rule, now_s)
            scale.plan = plan_role(scale.rule, scale.state, scale.window)
            scale.state = scale.plan.state
            if self.mode == "advise":
                self._advise(role, scale.plan)
            elif scale.plan.change:
                await self._make(role, scale, scale.plan, now_s)
        for predictions in self._predictions.values():
            predictions.clear()

    def _advise(self, role: str, plan: RolePlan) -> None:
        if plan.change and self._told.get(role) != plan.change:
            what = "start another" if plan.change > 0 else "retire a"
            _log.info("scale: would %s %s instance: %s", what, role, plan.why)
        self._told[role] = plan.change

    async def _make(self, role: str, scale: RoleScale, plan: RolePlan, now_s: float) -> None:
        scale.state = changed(scale.rule, scale.state, plan.change, now_s)
        try:
            if plan.change > 0:
                _log.info("scale: starts another %s instance: %s", role, plan.why)
                await self._fleet.start_instance(role)
                scale.num_started += 1
            else:
                name = str(self._ready(role)[-1])
                _log.info("scale: retires %s: %s", name, plan.why)
                self._fleet.retire_instance(name)
                scale.num_retired += 1
        except ApiError as error:
            _log.warning("scale: %s", error.message)

    # -- what was seen --

    def _ready(self, role: str) -> list[Instance]:
        return [one for one in self._fleet.living if one.role == role and one.is_open]

    def _window(self, role: str, rule: ScaleRule, now_s: float) -> RoleWindow:
        ready = self._ready(role)
        others = [one for one in self._fleet.instances.values() if one.role == role and one not in ready]
        pending = 0 if self._fleet.starter is None else self._fleet.starter.num_pending(role)
        num_changing = pending + sum(one.state in ("loading", "draining") for one in others)
        times = self._times_of_prompts() if role == "prefill" else self._times_of_steps(ready)
        predicted_s, alone_s, busy_s, used = times
        num = len(ready)
        share = num / (num - 1) if num > 1 else math.inf
        if role == "prefill":
            fewer = busy_s / (self._options.scale_window_s * num) * share if num > 1 else math.inf
        else:
            fewer = max(self._step_s(ready, share) / rule.target_s, used * share) if num > 1 else math.inf
        return RoleWindow(now_s, num, num_changing, predicted_s, alone_s, fewer, used)

    def _times_of_prompts(self) -> tuple[float, float, float, float]:
        """Predicted time to first token of nine requests of ten, the same alone, seconds of computing in all, 0."""
        given = self._predictions["prefill"]
        if not given:
            return 0.0, 0.0, 0.0, 0.0
        at = min(len(given) - 1, int(_PERCENTILE * len(given)))
        predicted, alone = (sorted(column)[at] for column in zip(*given))
        return predicted, alone, sum(alone_s for _, alone_s in given), 0.0

    def _times_of_steps(self, ready: list[Instance]) -> tuple[float, float, float, float]:
        """Predicted step of the slowest instance, a step of one request, 0, the fullest share of rows or KV tokens."""
        if not ready:
            return 0.0, 0.0, 0.0, 0.0
        slowest = max(ready, key=lambda one: one.forecast.step_s())
        alone_s = slowest.steps.predict_ms(1, 0) / 1e3
        return slowest.forecast.step_s(), alone_s, 0.0, max(map(self._used, ready))

    def _used(self, instance: Instance) -> float:
        router, most_rows = instance.pool.router, self._options.engine.max_running
        kv_tokens = min(info.kv_tokens for info in instance.pool.infos)
        return max(max(router.num_requests) / most_rows, max(router.num_tokens) / kv_tokens)

    def _step_s(self, ready: list[Instance], share: float) -> float:
        """Of the slowest, with so many times what it has."""
        routers = [(one.steps, one.pool.router) for one in ready]
        return max(
            steps.predict_ms(round(share * max(r.num_requests)), round(share * max(r.num_tokens))) / 1e3
            for steps, r in routers
        )

    def document(self) -> dict[str, object]:
        """For GET /v1/eprt/instances."""
        return {"mode": self.mode, "roles": {role: _document(scale) for role, scale in self.roles.items()}}


def _document(scale: RoleScale) -> dict[str, object]:
    rule, window, plan = scale.rule, scale.window, scale.plan
    return {
        "least": rule.least,
        "most": rule.most,
        "target_s": rule.target_s,
        "predicted_s": window.predicted_s if window else None,
        "used": window.used if window else None,
        "wanted": scale.wanted if plan else None,
        "why": plan.why if plan else "no window has ended",
        "started": scale.num_started,
        "retired": scale.num_retired,
    }
