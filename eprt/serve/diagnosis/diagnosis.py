"""Diagnosis: the ranks' counters as windows, their log, and the findings: at /v1/eprt/diagnose, in the server's log, in
the metrics and for the balancer.

Nothing here delays a step: ranks send their counters without waiting, and what comes late is in the next window.
Windows are written and analysed in a thread. Knows nothing of what windows mean (eprt.diagnostics).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eprt import env
from eprt.diagnostics import Finding, Report, WindowMatrices, WindowRecord, WindowWriter, rank_speeds
from eprt.diagnostics.detect.hangs import is_missing
from eprt.diagnostics.log.recent import RecentWindows
from eprt.diagnostics.log.standing import LoggedProcess, Standing
from eprt.diagnostics.mutes import FILE_NAME, Mute, MuteChange, MuteFile, with_mutes
from eprt.serve.diagnosis.collector import Collector
from eprt.serve.diagnosis.hang_report import hang_line, hang_subject, live_hangs, with_hangs
from eprt.serve.diagnosis.hang_watch import LOOK_S, HangWatch
from eprt.serve.diagnosis.notices import Notices
from eprt.serve.ranks.messages import EngineInfo, WaitTotals
from eprt.serve.ranks.pool import RankPool
from eprt.serve.ranks.rank import Rank

_log = logging.getLogger(__name__)

_MAX_WINDOWS = 60  # ten minutes of work
_MAX_LOG_FILE = 32 << 20


class Diagnosis:
    """Diagnoses one server's ranks.

    Args:
        log_dir: where to write diagnose_rank*.log; None: nowhere.
        max_log_bytes: of all its files.
        window_s: between two windows.
    """

    def __init__(
        self, num_ranks: int, log_dir: str | None = None, max_log_bytes: int = 1 << 30, window_s: float = 10.0
    ):
        self._num_ranks, self._log_dir, self._window_s = num_ranks, log_dir, window_s
        self._file_bytes = max(1, min(_MAX_LOG_FILE, max_log_bytes // (2 * num_ranks)))
        self._collector: Collector | None = None
        self._closing = asyncio.Lock()  # one window after the other
        self._unheard_s = time.time()  # until when no rank had reported anything
        self._writer: WindowWriter | None = None
        self._recent = RecentWindows(_MAX_WINDOWS)
        self._analysing: asyncio.Task | None = None
        self._report: Report | None = None
        self._processes: dict[int, LoggedProcess] = {}
        self.hangs = HangWatch(window_s, env.get("EPRT_TIMEOUT_S"))
        self.notices = Notices()
        self.speeds_N = np.ones(num_ranks)  # eprt.diagnostics.rank_speeds of the latest windows
        self.silent: tuple[int, ...] = ()  # ranks that reported no call in the latest window
        self._view = 0  # number of the ranks' view in the latest window
        self._ranks: dict[str, Any] | None = None  # eprt.ranks/1, of a server that goes on when ranks are lost
        self._mutes = None if log_dir is None else MuteFile(Path(log_dir) / FILE_NAME)
        self._mute_trouble = ""  # why the mutes cannot be read
        self._hung = False  # whether a rank held the others up when the latest window ended
        self.num_windows = self.num_log_errors = self._num_reports = 0
        self._refused = 0  # windows since the disk took the latest

    async def run(self, pool: RankPool) -> None:
        """Closes a window of the pool's ranks every window_s seconds. Ends only by cancellation."""
        loop = asyncio.get_running_loop()
        next_s = loop.time() + self._window_s
        while True:
            await asyncio.sleep(next_s - loop.time())
            next_s = max(next_s + self._window_s, loop.time())
            await self.close_pool_window(pool)

    async def watch_hangs(self, pool: RankPool) -> None:
        """Looks several times a second for a rank that holds the others up. Ends with the pool, or by cancellation."""
        while not pool.ended.is_set():
            self._note_ranks(pool)
            if pool.ready.is_set() and not pool.roster.changing:
                await self.look_for_hangs(pool)
            await asyncio.sleep(LOOK_S)

    def _note_ranks(self, pool: RankPool) -> None:
        ranks = pool.elasticity.document() if pool.elasticity.enabled else None
        if ranks != self._ranks:
            self._ranks = ranks
            self._num_reports += 1

    async def look_for_hangs(self, pool: RankPool) -> None:
        """A hang that begins or ends also ends a window, so that the log tells of it. Never raises."""
        try:
            before = self.live_hangs()
            if self.hangs.look([rank for rank in pool.members if not (rank.left or rank.lost)], self._window):
                self._note_processes(pool.members)
                self._tell_hangs(before)
                await self.close_pool_window(pool, is_last=True)
        except Exception:
            _log.exception("diagnosis: a defect; the server goes on")

    def _tell_hangs(self, before: Sequence[Finding]) -> None:
        self._num_reports += 1
        hangs = self.live_hangs()
        known, lasting = ({hang_subject(hang) for hang in some} for some in (before, hangs))
        for hang in hangs:
            if hang_subject(hang) not in known:
                _log.warning("diagnosis: %s", hang_line(hang))
        for hang in before:
            if hang_subject(hang) not in lasting:
                seconds = time.time() - (hang.t_start or time.time())
                _log.warning("diagnosis: %s goes on after %.1f s", hang_subject(hang), seconds)

    async def close_pool_window(self, pool: RankPool, is_last: bool = False) -> None:
        """Closes a window with what the pool's ranks have reported. Never raises: the server goes on without it."""
        totals = {rank.rank: rank.waits for rank in pool.members if rank.waits is not None}
        try:
            self._note_processes(pool.members)
            async with self._closing:
                if pool.infos and pool.roster.number != self._view:
                    await self._begin_view(pool, totals)
                elif pool.infos and totals:
                    await self.close_window(totals, pool.infos[0], is_last, _waits_now(pool.members))
                else:
                    self._unheard_s = time.time()
        except Exception:
            _log.exception("diagnosis: a defect; the server goes on")

    async def _begin_view(self, pool: RankPool, totals: Mapping[int, WaitTotals]) -> None:
        """Findings are of one view: a returned rank is another one."""
        self._view, self.silent = pool.roster.number, ()
        self._recent = RecentWindows(_MAX_WINDOWS)
        self.hangs.forget()
        collector = await self._open_collector(pool.infos[0])
        collector.skip_window(totals, pool.roster.members)

    async def close_window(
        self,
        totals: Mapping[int, WaitTotals],
        info: EngineInfo,
        is_last: bool = False,
        waiting: Mapping[int, Standing] | None = None,
    ) -> None:
        """Returns when the window is written; its analysis goes on.

        totals: of the ranks that have reported any.
        waiting: the ranks that wait for another now, and have since they reported.
        """
        collector = await self._open_collector(info)
        collector.processes = self._processes
        was_hanging, self._hung = self._hung, bool(self.hangs.hangs)
        standings = self.hangs.standings if was_hanging or self._hung else None
        if standings is not None:
            waiting = _that_wait(standings)
        collected = collector.close_window(totals, is_last, waiting=waiting, standings=standings)
        if collected is None:
            return
        for line in self.notices.silence_lines(collected.silent):
            _log.warning("diagnosis: %s", line)
        self.silent = collected.silent
        if not collected.records:
            return
        self.num_windows += 1
        for record in collected.records:
            self._recent.add_record(record)
        await asyncio.to_thread(self._write, collected.records)
        if self._analysing is None or self._analysing.done():  # a large job may take longer than a window
            self._analysing = asyncio.get_running_loop().create_task(self._analyse(self._recent.records_after(-1)))

    @property
    def _window(self) -> int:
        """The number of the one under way."""
        return 0 if self._collector is None else self._collector.window

    def _note_processes(self, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            self._processes[rank.rank] = LoggedProcess(rank.host, rank.pid, rank.info.gpu if rank.info else None)

    async def _open_collector(self, info: EngineInfo) -> Collector:
        if self._collector is None:
            first_window = await asyncio.to_thread(self._open_log, info)
            self._collector = Collector(info.node_of_rank, info.moe_layers, first_window, self._unheard_s)
        return self._collector

    async def wait_analysed(self) -> None:
        """Returns when the windows that were closed are analysed too."""
        if self._analysing is not None:
            await self._analysing

    async def close_last_window(self, pool: RankPool) -> None:
        """Closes the last window, however short, with the ranks that remain."""
        await self.close_pool_window(pool, is_last=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait_analysed(), 2.0)

    # -- the log --

    def _open_log(self, info: EngineInfo) -> int:
        """The first window's number: a log that the directory already has is continued."""
        if self._log_dir is None:
            return 0
        try:
            self._writer = writer = WindowWriter(self._log_dir, self._file_bytes)
            aside = writer.new_run(self._num_ranks, info.node_of_rank)
            if aside is not None:
                _log.warning("diagnosis: %s had a log of other ranks; it is in %s now", self._log_dir, aside)
            return writer.first_window
        except OSError as error:
            self._cannot_write(error)
            return 0

    def _write(self, records: Sequence[WindowRecord]) -> None:
        writer = self._writer
        if writer is None:
            return
        try:
            for record in records:
                writer.write(record)
        except OSError as error:
            self._cannot_write(error)
        else:
            if self._refused:
                _log.warning(
                    "diagnosis: the log in %s is written again; %d windows are lost", self._log_dir, self._refused
                )
                self._refused = 0

    def _cannot_write(self, error: OSError) -> None:
        self.num_log_errors += 1
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            told = "diagnosis: the log in %s cannot be written (%d windows so far): %s"
            _log.error(told, self._log_dir, self._refused, error)

    # -- results --

    async def _analyse(self, records: list[WindowRecord]) -> None:
        try:
            report = await asyncio.to_thread(Report.of_records, records)
            speeds_N = await asyncio.to_thread(rank_speeds, report, self.speeds_N)
        except Exception:
            _log.exception("diagnosis: a defect in the analysis; the windows are kept")
            return
        self._report, self.speeds_N = report, speeds_N
        self._num_reports += 1
        told = with_mutes([f.to_json() for f in report.findings if f.kind != "hang"], self.known_mutes())
        found = [finding for finding in told if finding["muted_until"] is None]
        for line in self.notices.finding_lines(found, int(report.matrices.window_W[-1])):
            _log.warning("diagnosis: %s", line)

    def why_read_only(self) -> str:
        """Why nobody can mute findings; empty: somebody can."""
        if self._mutes is None:
            return "the server has no --diagnose-dir, so it has no place for mutes"
        return self._mutes.why_read_only()

    def change_mutes(self, change: MuteChange) -> bool:
        """Whether something is different now. OSError from the disk, ValueError for a file that cannot be used."""
        assert self._mutes is not None, self.why_read_only()
        changed = self._mutes.change(change, time.time())
        self._num_reports += 1
        return changed

    def known_mutes(self) -> list[Mute]:
        """Of the log's directory; a file that cannot be used is told of once."""
        if self._mutes is None:
            return []
        try:
            mutes, self._mute_trouble = self._mutes.read(time.time()), ""
        except (OSError, ValueError) as error:
            if str(error) != self._mute_trouble:
                _log.warning("diagnosis: %s", error)
            mutes, self._mute_trouble = [], str(error)
        return mutes

    def live_hangs(self) -> list[Finding]:
        """Ranks that hold the others up now."""
        return live_hangs(self.hangs, self._processes, self._window)

    @property
    def matrices(self) -> WindowMatrices | None:
        """Of the windows analysed last."""
        return None if self._report is None else self._report.matrices

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever there are new records or findings."""
        return self.num_windows, self._num_reports

    def records(self, since: int) -> list[WindowRecord]:
        """The records of the windows after number `since`, as far as they are kept."""
        return self._recent.records_after(since)

    def findings(self) -> dict[str, Any]:
        """eprt.findings/1 over the last ten minutes of work, with five more fields: newest_window (null before the
        first), silent_ranks, rank_speeds, mute_refusal, slots (eprt.ranks/1; null: no rank may be lost)."""
        report = self._report
        found = with_hangs(() if report is None else report.findings, self.live_hangs())
        none = {"schema": "eprt.findings/1", "num_ranks": self._num_ranks, "windows": 0}
        return {
            **(none if report is None else report.to_json()),
            "findings": with_mutes([finding.to_json() for finding in found], self.known_mutes()),
            "newest_window": None if report is None else int(report.matrices.window_W[-1]),
            "silent_ranks": list(self.silent),
            "rank_speeds": np.round(self.speeds_N, 3).tolist(),
            "mute_refusal": self.why_read_only(),
            "slots": self._ranks,
        }


def _waits_now(ranks: Sequence[Rank]) -> dict[int, Standing]:
    """Of the ranks whose latest word is that they wait for another."""
    now_s = time.monotonic()
    return _that_wait({rank.rank: rank.standing(now_s) for rank in ranks if rank.beat_s > rank.heard_s})


def _that_wait(standings: Mapping[int, Standing]) -> dict[int, Standing]:
    return {rank: stood for rank, stood in standings.items() if stood.waits_for is not None and not is_missing(stood)}
