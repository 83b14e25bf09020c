"""Daemon: a rebalancer in a separate process that polls a running server, plans, posts and follows the migration.

Each poll() asks the server for its state and load and returns a Status. If the server is away or restarted, the daemon
retries with growing pauses; after a restart all measurements start from zero. Knows HTTP only through RemoteServer, and
nothing of terminals (daemon_main.py).
"""

import time
from dataclasses import asdict, dataclass
from typing import Any

from .controller import Controller, NoLoadError
from .job import solve
from .placement import Placement
from .remote import RemoteServer, ServerAnswerError, ServerRefusedError, ServerUnreachableError
from .trigger import Decision

SCHEMA = "eprt.balancer/1"
_FOLLOW_S = 0.5
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 5.0


@dataclass(frozen=True)
class Status:
    """What one poll found: a line of `eprt balancer`, or an object of eprt.balancer/1."""

    url: str
    # "watching", "migrating", "standing by" (the server rebalances itself), "waiting" (the server has no load yet),
    # "refused" or "unreachable".
    state: str
    news: str = ""  # what has happened since the previous poll, if anything
    server_id: str | None = None
    epoch: int | None = None  # of the placement in force
    windows: int = 0  # of load, since its latest change
    load_changes: int = 0
    max_over_mean: float | None = None  # the busiest rank's recent load over the mean
    lifetime_s: float = 0.0  # how long a plan for that load is expected to be useful
    rank_speeds: list[float] | None = None
    decision: Decision | None = None  # taken in this poll
    migration: dict[str, Any] | None = None  # of eprt.rebalance/1: the one under way or the latest

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "time_s": time.time(), **asdict(self)}

    def __str__(self) -> str:
        parts = [f"{self.url} {self.state}"]
        if self.epoch is not None:
            parts.append(f"placement {self.epoch}")
        if self.max_over_mean is not None:
            over = f"over {self.windows} windows, lasts {self.lifetime_s:.0f} s"
            parts.append(f"max/mean {self.max_over_mean:.3f} {over}")
        if self.rank_speeds is not None and min(self.rank_speeds) < 1:
            slow = [f"{rank} ({speed:.2f})" for rank, speed in enumerate(self.rank_speeds) if speed < 1]
            parts.append(f"slow ranks {', '.join(slow)}")
        if self.migration is not None and self.state == "migrating":
            parts.append(f"round {self.migration['rounds_done']} of {self.migration['num_rounds']}")
        return ", ".join(parts) + (f"; {self.news}" if self.news else "")


class Daemon:
    """Keeps one server balanced by repeated calls of poll().

    interval_s: time between two polls, which is a window of load.
    slow_ranks: give less load to ranks that the server's diagnosis finds slow.
    """

    def __init__(self, server: RemoteServer, controller: Controller, interval_s: float = 5.0, slow_ranks: bool = False):
        self._server, self.controller = server, controller
        self._interval_s, self._slow_ranks = interval_s, slow_ranks
        self.pause_s = interval_s  # how long to wait before the next poll()
        self.job_id: int | None = None  # the migration that is being followed
        self._server_id: str | None = None
        self._placement: Placement | None = None
        self._retry_s = 0.0

    def poll(self) -> Status:
        """Raises only PermissionError, if the server does not accept the key."""
        try:
            status = self._poll_server()
        except ServerUnreachableError as error:
            return self._retry("unreachable", str(error))
        except ServerRefusedError as error:
            if error.status in (401, 403):
                raise PermissionError(str(error)) from None
            return self._retry("refused", str(error))
        except ServerAnswerError as error:
            self._placement = None
            return self._retry("refused", f"its answers have another form: {error}")
        except ValueError as error:  # placement, load and sample do not match: fetch all of them again
            self._placement = None
            return self._retry("refused", str(error))
        self._retry_s = 0.0
        return status

    def _retry(self, state: str, why: str) -> Status:
        """The next poll comes soon, but later with each failure in a row."""
        self.pause_s = self._retry_s = min(2 * self._retry_s or _FIRST_RETRY_S, _LONGEST_RETRY_S)
        return Status(self._server.url, state, why)

    def _poll_server(self) -> Status:
        remote, news = self._server.rebalancing(), []
        if remote["server_id"] != self._server_id:
            news += self._on_new_server(remote["server_id"])
        self.pause_s = self._interval_s
        try:
            if self.controller.observe(self._server.load_snapshot()):
                news.append("the load has changed")
        except NoLoadError as error:
            return self._status("waiting", remote, [*news, str(error)])
        if self._slow_ranks:
            self.controller.set_speed(self._server.rank_speeds())
        if remote["state"] != "idle":
            self.pause_s = min(_FOLLOW_S, self._interval_s)
            return self._status("migrating", remote, news)
        if self.job_id is not None:
            news.append(self._on_migration_end(remote["migration"]))
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
        trace = self._server.routing_sample()[0] if placement.num_nodes > 1 else None
        request = self.controller.plan_request(placement, trace)
        if request is None:
            return self._status("watching", remote, news)
        answer = solve(request)
        decision = self.controller.decide(time.monotonic(), placement, answer)
        news.append(str(decision))
        if not decision.migrate:
            return self._status("watching", remote, news, decision)
        remote = self._server.post_placement(answer.target, self.controller.gpu_speed)
        self.job_id = remote["migration"]["job_id"]
        self.pause_s = min(_FOLLOW_S, self._interval_s)
        return self._status("migrating", remote, news, decision)

    def _on_new_server(self, server_id: str) -> list[str]:
        restarted, self._server_id, self._placement = self._server_id is not None, server_id, None
        if self.job_id is not None:
            self.job_id = None
            self.controller.migration_ended(time.monotonic(), succeeded=False)
        return ["the server was restarted; its load is measured from the start"] if restarted else []

    def _on_migration_end(self, migration: dict[str, Any] | None) -> str:
        """The followed migration has ended; migration: the server's latest."""
        job_id, self.job_id = self.job_id, None
        if migration is None or migration["job_id"] != job_id:  # another client has posted since
            self.controller.migration_ended(time.monotonic(), succeeded=True)
            return f"migration {job_id} has ended; others followed it"
        self.controller.migration_ended(time.monotonic(), migration["state"] == "done")
        moved, reason = sum(migration["moves"].values()), f": {migration['reason']}" if migration["reason"] else ""
        return f"migration {job_id} {migration['state']}: {moved} experts in {migration['seconds']:.1f} s{reason}"

    def _status(self, state: str, remote: dict[str, Any], news: list[str], decision: Decision | None = None) -> Status:
        statistics, speed_G = self.controller.statistics, self.controller.gpu_speed
        return Status(
            self._server.url,
            state,
            "; ".join(news),
            remote["server_id"],
            remote["epoch"],
            windows=len(statistics.current_windows),
            load_changes=statistics.num_changes,
            max_over_mean=None if self._placement is None else self.controller.max_over_mean(self._placement),
            lifetime_s=statistics.lifetime_s,
            rank_speeds=None if speed_G is None else speed_G.tolist(),
            decision=decision,
            migration=remote["migration"],
        )
