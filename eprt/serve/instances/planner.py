"""Planner: how many instances of a role there should be: the rule alone, a pure function of one window after another.

One more where the predicted time comes near its target in several windows in a row, if waiting for others is what takes
it; one fewer where the others would have ample room for longer; one at a time, and none for a while after. Where an
instance is wanted again soon after one was let go, letting go takes twice as many quiet windows from then on. Knows
nothing of instances: scaler.py makes windows of what they do.
"""

import math
from dataclasses import dataclass, replace

_NEAR = 0.8  # of the target: above it, one more is wanted
_AMPLE = 0.6  # below it, with one fewer, one fewer is enough
_WAITS = 1.2  # a predicted time is due to others if it exceeds that of a request alone by this factor
_NEAR_WINDOWS = 3
_QUIET_WINDOWS, _MOST_QUIET_WINDOWS = 6, 192
_SOON = 10  # cool-downs: a start so soon after a retirement says that the retirement came too early


@dataclass(frozen=True)
class ScaleRule:
    """Of one role."""

    least: int  # instances
    most: int
    target_s: float  # time that should not be exceeded
    cooldown_s: float  # after a change until the next


@dataclass(frozen=True)
class RoleWindow:
    """What was seen of one role in one window."""

    now_s: float  # its end
    num_ready: int
    num_changing: int  # that load, or drain
    predicted_s: float  # time that its requests get
    alone_s: float  # the same, if they were alone
    pressure_fewer: float  # share of one instance fewer that would be used, or share of the target; inf: cannot be
    used: float = 0.0  # share of something that runs out, as rows or KV pages


@dataclass(frozen=True)
class RoleState:
    """What the planner remembers."""

    num_near: int = 0  # windows in a row
    num_quiet: int = 0  # likewise
    quiet_windows: int = _QUIET_WINDOWS  # that are needed to let one go
    changed_s: float = -math.inf
    retired_s: float = -math.inf


@dataclass(frozen=True)
class RolePlan:
    """The planner's word on one window."""

    state: RoleState
    change: int  # 1, 0 or -1
    why: str


def plan_role(rule: ScaleRule, state: RoleState, window: RoleWindow) -> RolePlan:
    """The change to make now. It is the caller's to make it, and to say so with changed()."""
    waits = window.predicted_s > _WAITS * window.alone_s
    is_short = window.num_ready + window.num_changing < rule.least
    is_near = is_short or (waits and window.predicted_s > _NEAR * rule.target_s) or window.used > _NEAR
    is_quiet = not is_near and window.pressure_fewer < _AMPLE
    state = replace(
        state, num_near=state.num_near + 1 if is_near else 0, num_quiet=state.num_quiet + 1 if is_quiet else 0
    )
    num = window.num_ready
    if window.num_changing:
        return RolePlan(state, 0, "one loads or drains")
    if window.now_s - state.changed_s < rule.cooldown_s:
        return RolePlan(state, 0, "cooling down")
    if is_short:  # for some windows: one that was lost may be on its way back
        return RolePlan(state, int(state.num_near >= _NEAR_WINDOWS), f"{num} are fewer than {rule.least}")
    times = f"predicted {window.predicted_s:.3g} s of {rule.target_s:g} s, {window.used:.0%} in use"
    if state.num_near >= _NEAR_WINDOWS:
        return RolePlan(state, 1 if num < rule.most else 0, times + ("" if num < rule.most else ", at most"))
    if state.num_quiet >= state.quiet_windows and num > rule.least:
        return RolePlan(state, -1, f"{times}; one fewer would be {window.pressure_fewer:.0%} in use")
    return RolePlan(state, 0, times)


def changed(rule: ScaleRule, state: RoleState, change: int, now_s: float) -> RoleState:
    """The state behind a change that was made, or tried."""
    quiet_windows = state.quiet_windows
    if change > 0:
        is_soon = now_s - state.retired_s < _SOON * rule.cooldown_s
        quiet_windows = min(2 * quiet_windows, _MOST_QUIET_WINDOWS) if is_soon else _QUIET_WINDOWS
    retired_s = now_s if change < 0 else state.retired_s
    return RoleState(quiet_windows=quiet_windows, changed_s=now_s, retired_s=retired_s)
