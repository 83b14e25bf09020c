"""Daemon: a rebalancer beside a running server, in a process of its own: look, plan, post, follow to the end.

Each look() asks the server a few things and says what came of it. Servers that go away, come back or are restarted are
waited for, longer and longer between tries; what was learnt of a server that was restarted is forgotten.
"""

import time
from dataclasses import asdict, dataclass
from typing import Any

from .controller import Controller
from .job import solve
from .placement import Placement
from .remote import RefusedError, RemoteServer, UnreachableError
from .trigger import Decision

SCHEMA = "eprt.balancer/1"
_FOLLOW_S = 0.5
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 5.0


@dataclass(frozen=True)
class Status:
    """After one look. state: "watching", "migrating", "standing by" (the server rebalances itself), "waiting" (the
    server has no load yet), "refused" or "unreachable". news: what has happened since the look before, if anything.

    max_over_mean: the busiest rank's recent load over the mean. lifetime_s: how long that load is expected to last.
    decision: taken in this look. migration: of eprt.rebalance/1, the one under way or the latest.
    """

    url: str
    state: str
    news: str = ""
    server_id: str | None = None
    epoch: int | None = None
    windows: int = 0
    load_changes: int = 0
    max_over_mean: float | None = None
    lifetime_s: float = 0.0
    rank_speeds: list[float] | None = None
    decision: Decision | None = None
    migration: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "time_s": time.time(), **asdict(self)}

    def __str__(self) -> str:
        parts = [f"{self.url} {self.state}"]
        if self.epoch is not None:
            parts.append(f"placement {self.epoch}")
        if self.max_over_mean is not None:
            parts.append(
                f"max/mean {self.max_over_mean:.3f} over {self.windows} windows, lasts {self.lifetime_s:.0f} s"
            )
        if self.rank_speeds is not None and min(self.rank_speeds) < 1:
            slow = [f"{rank} ({speed:.2f})" for rank, speed in enumerate(self.rank_speeds) if speed < 1]
            parts.append(f"slow ranks {', '.join(slow)}")
        if self.migration is not None and self.state == "migrating":
            parts.append(f"round {self.migration['rounds_done']} of {self.migration['num_rounds']}")
        return ", ".join(parts) + (f"; {self.news}" if self.news else "")


class Daemon:
    """interval_s: between two looks, which is a window of the load. slow_ranks: give ranks that the server's diagnosis
    finds slow less load. pause_s: how long to wait before the next look()."""

    def __init__(self, server: RemoteServer, controller: Controller, interval_s: float = 5.0, slow_ranks: bool = False):
        self._server, self.controller = server, controller
        self._interval_s, self._slow_ranks = interval_s, slow_ranks
        self.pause_s = interval_s
        self.job_id: int | None = None  # the migration that is being followed
        self._server_id: str | None = None
        self._placement: Placement | None = None
        self._retry_s = 0.0

    def look(self) -> Status:
        """Never raises for what a server does, but PermissionError when it does not know the key."""
        try:
            status = self._look()
        except (UnreachableError, RefusedError, ValueError) as error:
            if isinstance(error, RefusedError) and error.status in (401, 403):
                raise PermissionError(str(error)) from None
            self._retry_s = min(2 * self._retry_s or _FIRST_RETRY_S, _LONGEST_RETRY_S)
            self.pause_s = self._retry_s
            if isinstance(error, ValueError):  # placement, load and sample do not go together: ask for all of them anew
                self._placement = None
            state = "unreachable" if isinstance(error, UnreachableError) else "refused"
            return Status(self._server.url, state, str(error))
        self._retry_s = 0.0
        return status

    def _look(self) -> Status:
        remote, news = self._server.rebalancing(), []
        if remote["server_id"] != self._server_id:
            news += self._on_another_server(remote["server_id"])
        self.pause_s = self._interval_s
        try:
            if self.controller.observe(self._server.load()):
                news.append("the load has changed")
        except ValueError as error:
            return self._status("waiting", remote, [*news, str(error)])
        if self._slow_ranks:
            self.controller.set_speed(self._server.rank_speeds())
        if remote["state"] != "idle":
            self.pause_s = min(_FOLLOW_S, self._interval_s)
            return self._status("migrating", remote, news)
        if self.job_id is not None:
            news.append(self._on_end(remote["migration"]))
        if remote["mode"] == "auto":
            return self._status("standing by", remote, [*news, "the server rebalances itself (--rebalance auto)"])
        if remote["epoch"] != (None if self._placement is None else self._placement.epoch):
            self._placement = self._server.placement()
        if not self.controller.due(time.monotonic()):
            return self._status("watching", remote, news)
        return self._plan(remote, news)

    def _plan(self, remote: dict[str, Any], news: list[str]) -> Status:
        placement = self._placement
        assert placement is not None
        trace = self._server.trace() if placement.num_nodes > 1 else None
        request = self.controller.request(placement, trace)
        if request is None:
            return self._status("watching", remote, news)
        answer = solve(request)
        decision = self.controller.decide(time.monotonic(), placement, answer)
        news.append(str(decision))
        if not decision.migrate:
            return self._status("watching", remote, news, decision)
        remote = self._server.move_to(answer.target, self.controller.gpu_speed)
        self.job_id = remote["migration"]["job_id"]
        self.pause_s = min(_FOLLOW_S, self._interval_s)
        return self._status("migrating", remote, news, decision)

    def _on_another_server(self, server_id: str) -> list[str]:
        restarted, self._server_id, self._placement = self._server_id is not None, server_id, None
        if self.job_id is not None:
            self.job_id = None
            self.controller.ended(time.monotonic(), succeeded=False)
        return ["the server was restarted, its load is measured anew"] if restarted else []

    def _on_end(self, migration: dict[str, Any] | None) -> str:
        """The migration that was followed is under way no more."""
        job_id, self.job_id = self.job_id, None
        if migration is None or migration["job_id"] != job_id:  # others have posted since
            self.controller.ended(time.monotonic(), succeeded=True)
            return f"migration {job_id} has ended, others came after it"
        self.controller.ended(time.monotonic(), migration["state"] == "done")
        moved, reason = sum(migration["moves"].values()), migration["reason"]
        return f"migration {job_id} {migration['state']}: {moved} experts in {migration['seconds']:.1f} s" + (
            f": {reason}" if reason else ""
        )

    def _status(self, state: str, remote: dict[str, Any], news: list[str], decision: Decision | None = None) -> Status:
        statistics, speed_G = self.controller.statistics, self.controller.gpu_speed
        return Status(
            self._server.url,
            state,
            "; ".join(news),
            remote["server_id"],
            remote["epoch"],
            windows=0 if statistics is None else len(statistics.current),
            load_changes=0 if statistics is None else statistics.num_changes,
            max_over_mean=None if self._placement is None else self.controller.balance(self._placement),
            lifetime_s=0.0 if statistics is None else statistics.lifetime_s,
            rank_speeds=None if speed_G is None else speed_G.tolist(),
            decision=decision,
            migration=remote["migration"],
        )
