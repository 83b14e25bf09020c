"""Diagnosis of a server: findings, silent ranks, the log on disk, and lines in the server's log."""

import asyncio
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from eprt.diagnostics import Report, WindowWriter, analyse, rank_speeds, read_log

from eprt.serve.diagnosis.diagnosis import Diagnosis
from eprt.serve.ranks.messages import Heartbeat
from tests.unit.serve.diagnosis.cases import INFO, N, close, continued, members, metrics, totals


def test_slow_rank_is_found_and_logged(tmp_path):
    diagnosis = Diagnosis(N, str(tmp_path))
    assert diagnosis.findings() == {
        "schema": "eprt.findings/1",
        "num_ranks": N,
        "windows": 0,
        "findings": [],
        "newest_window": None,
        "silent_ranks": [],
        "rank_speeds": [1.0] * N,
        "mute_refusal": "",
        "slots": None,
    }
    found = close(diagnosis, *(totals(window, slow=3) for window in range(1, 6)))
    assert (found["windows"], found["newest_window"]) == (5, 4)
    assert [(f["kind"], f["rank"], f["cause"]) for f in found["findings"]] == [("column", 3, "comp")]
    records = read_log(tmp_path).records
    assert len(records) == 5 * N and {r.num_calls for r in records} == {100}
    assert records[0].dispatch_wait_us[3] == pytest.approx(6000)
    expected_N = rank_speeds(Report.of_records(records))
    assert found["rank_speeds"][3] == pytest.approx(0.2) and np.allclose(found["rank_speeds"], expected_N)


@pytest.mark.parametrize("enabled", [True, False])
def test_slots_of_a_server_that_goes_on_are_told_and_are_news(enabled):
    document = {"view": 0, "ranks": [{"rank": 0, "state": "ready"}]}
    elasticity = SimpleNamespace(enabled=enabled, document=lambda: dict(document))
    ended, pool = asyncio.Event(), SimpleNamespace(elasticity=elasticity, ready=asyncio.Event())

    async def watch(diagnosis: Diagnosis) -> tuple[int, int]:
        watched: Any = SimpleNamespace(**vars(pool), ended=ended)
        watching = asyncio.ensure_future(diagnosis.watch_hangs(watched))
        await asyncio.sleep(0)
        ended.set()
        watching.cancel()
        ended.clear()
        return diagnosis.version

    diagnosis = Diagnosis(N)
    first = asyncio.run(watch(diagnosis))
    assert diagnosis.findings()["slots"] == (document if enabled else None)
    assert asyncio.run(watch(diagnosis)) == first, "nothing has changed"
    document["view"] = 1
    assert (asyncio.run(watch(diagnosis)) != first) == enabled


def test_the_first_window_is_as_long_as_its_calls_took(tmp_path):
    """It began when no rank had told anything yet, not when it is closed."""
    roster = SimpleNamespace(number=0)
    silent: Any = SimpleNamespace(members=[], infos=[], roster=roster)
    telling: Any = SimpleNamespace(members=members(totals(1)), infos=[INFO], roster=roster)

    async def go() -> tuple[float, float]:
        diagnosis = Diagnosis(N, str(tmp_path))
        await asyncio.sleep(0.05)
        before_s = time.time()
        await diagnosis.close_pool_window(silent)
        after_s = time.time()
        await asyncio.sleep(0.05)
        await diagnosis.close_pool_window(telling)
        return before_s, after_s

    before_s, after_s = asyncio.run(go())
    for record in read_log(tmp_path).records:
        assert before_s <= record.t_start <= after_s and record.t_end - record.t_start >= 0.049


def test_windows_without_calls_are_not_counted(tmp_path):
    diagnosis = Diagnosis(N, str(tmp_path))
    found = close(diagnosis, {}, totals(0), totals(1), totals(1), totals(1))
    assert found["windows"] == 1 and found["silent_ranks"] == []
    assert {r.window for r in read_log(tmp_path).records} == {0}


def test_a_late_rank_is_named_and_its_calls_come_with_its_next_window(tmp_path, caplog):
    diagnosis = Diagnosis(N, str(tmp_path))
    late = {**totals(2), 4: totals(1)[4]}
    with caplog.at_level(logging.INFO):
        assert close(diagnosis, totals(1), late)["silent_ranks"] == [4]
        assert metrics(diagnosis)['eprt_rank_silent{rank="4"}'] == 1
        assert close(diagnosis, {**totals(3), 4: totals(1)[4]})["silent_ranks"] == [4]
        assert close(diagnosis, totals(4))["silent_ranks"] == []
    said = [r.message for r in caplog.records if "silent" in r.message]
    assert len(said) == 2 and "rank 4 silent" in said[0] and "rank 4 no longer silent" in said[1]
    records = {(r.window, r.rank): r for r in read_log(tmp_path).records}
    assert len(records) == 4 * N - 2 and (1, 4) not in records and (2, 4) not in records
    assert records[3, 4].num_calls == 300 and sum(r.num_calls for r in records.values()) == 4 * N * 100
    assert records[3, 4].t_start == records[0, 4].t_end < records[3, 3].t_start
    assert sum(records[w, 4].experts.rows[0][0] for w in (0, 3)) == 400


def test_a_rank_that_never_reports_is_named_and_the_others_are_written(tmp_path):
    dead = [{rank: t for rank, t in totals(window).items() if rank != 0} for window in range(1, 4)]
    assert close(Diagnosis(N, str(tmp_path)), *dead)["silent_ranks"] == [0]
    log = read_log(tmp_path)
    assert {r.rank for r in log.records} == set(range(1, N)) and "nothing from rank 0" in str(log.problems[0])


def test_log_lines_carry_the_load_of_every_slot_and_its_expert(tmp_path):
    close(Diagnosis(N, str(tmp_path)), *(totals(window) for window in range(1, 5)))
    records = {(r.window, r.rank): r.experts for r in read_log(tmp_path).records}
    assert all(e.layers == (1, 2) and e.rows == ((100, 101), (101, 102)) for e in records.values())
    assert records[1, 1].expert_of_slot[0] == (2, 3) and records[2, 1].expert_of_slot[0] == (9, 3)
    assert [records[window, 1].epoch for window in range(4)] == [0, 0, 1, 1]


def test_a_restart_goes_on_in_the_same_directory(tmp_path):
    close(Diagnosis(N, str(tmp_path)), *(totals(window) for window in range(1, 4)))
    with (tmp_path / "diagnose_rank2.log").open("a") as file:
        file.write('{"schema":"eprt.diagnose/1","window":3,"t_st')  # the machine went down here
    found = close(Diagnosis(N, str(tmp_path)), *(totals(window, slow=3) for window in range(1, 4)))
    assert (found["windows"], found["newest_window"]) == (3, 5)
    log = read_log(tmp_path)
    assert sorted({r.window for r in log.records}) == list(range(6)) and len(log.records) == 6 * N
    assert [(p.file.name, p.line) for p in log.problems] == [("diagnose_rank2.log", 4)]


def test_a_log_of_other_ranks_is_put_aside_whole(tmp_path, caplog):
    for k, num_ranks in enumerate((4, 3)):
        for record in read_log(_log_of(num_ranks, tmp_path / f"made{k}")).records:
            WindowWriter(tmp_path / "log").write(record)
        close(Diagnosis(N, str(tmp_path / "log")), totals(1), totals(2))
        assert {r.num_ranks for r in read_log(tmp_path / "log").records} == {N}
        aside = tmp_path / "log" / f"earlier-{k + 1}"
        assert f"is in {aside} now" in caplog.text
        for path in (tmp_path / "log").glob("diagnose_rank*"):
            path.unlink()
    assert {r.num_ranks for r in read_log(tmp_path / "log" / "earlier-1").records} == {4}
    assert {r.num_ranks for r in read_log(tmp_path / "log" / "earlier-2").records} == {3}


def _log_of(num_ranks: int, directory: Path) -> Path:
    from tests.web.logs import write_log

    return write_log(directory, num_ranks, 2, num_ranks)


def test_the_log_on_disk_is_bounded(tmp_path):
    diagnosis = Diagnosis(N, str(tmp_path), max_log_bytes=40_000)
    close(diagnosis, *(totals(window) for window in range(1, 80)))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {f"diagnose_rank{r}.log{end}" for r in range(N) for end in ("", ".1")}
    assert sum(sizes.values()) <= 40_000
    log = read_log(tmp_path)
    windows = sorted({r.window for r in log.records if r.rank == 0})
    assert not log.problems and windows[-1] == 78 and windows == list(range(windows[0], 79)) and len(windows) > 6


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    diagnosis = Diagnosis(N, str(tmp_path / "file" / "log"))
    assert close(diagnosis, *(totals(window, slow=3) for window in range(1, 5)))["findings"]
    assert "cannot be written" in caplog.text and metrics(diagnosis)["eprt_diagnose_log_errors_total"] >= 1


def test_a_full_disk_is_named_and_so_is_its_end(tmp_path, caplog):
    diagnosis = Diagnosis(N, str(tmp_path))
    close(diagnosis, totals(1))
    files = list(tmp_path.glob("diagnose_rank*.log"))
    kept = {path: path.read_bytes() for path in files}
    for path in files:
        path.unlink()
        path.symlink_to("/dev/full")
    close(diagnosis, *(totals(window) for window in range(2, 7)))
    log, why = f"diagnosis: the log in {tmp_path}", "[Errno 28] No space left on device"
    assert [record.message for record in caplog.records] == [
        f"{log} cannot be written ({number} windows so far): {why}" for number in (1, 2, 4)
    ]
    for path in files:
        path.unlink()
        path.write_bytes(kept[path])
    caplog.clear()
    close(diagnosis, totals(7), totals(8))
    (again,) = caplog.records
    assert again.message == f"{log} is written again; 5 windows are lost"
    assert metrics(diagnosis)["eprt_diagnose_log_errors_total"] == 5
    written = read_log(tmp_path)
    assert not written.problems and sorted({r.window for r in written.records}) == [0, 6, 7]


def test_a_finding_is_said_once_when_it_begins_and_once_when_it_is_over(caplog):
    diagnosis = Diagnosis(N)
    calm, slow = (totals(w) for w in range(1, 6)), [totals(w, slow=3, since=5) for w in range(6, 14)]
    with caplog.at_level(logging.INFO):
        close(diagnosis, *calm, *slow)
    begun = [r.message for r in caplog.records]
    assert len(begun) == 1 and "the others wait for rank 3 (late compute)" in begun[0], begun
    assert "look for a throttled" in begun[0], "it says what to do"
    shown = metrics(diagnosis)
    assert (
        shown['eprt_findings{cause="comp",kind="column"}'] == 1
        and sum(value for name, value in shown.items() if name.startswith("eprt_findings")) == 1
    )
    assert shown['eprt_rank_slow{rank="3"}'] == 1 and shown['eprt_rank_slow{rank="2"}'] == 0
    assert shown['eprt_rank_speed{rank="3"}'] == pytest.approx(0.2)
    assert shown['eprt_rank_awaited_seconds{rank="3"}'] > 5 * shown['eprt_rank_awaited_seconds{rank="2"}'] > 0
    recovered = [continued(slow[-1], totals(w)) for w in range(1, 9)]
    with caplog.at_level(logging.INFO):
        close(diagnosis, *recovered)
    over = [r.message for r in caplog.records][1:]
    assert len(over) == 1 and "the others wait for rank 3: no longer" in over[0], over
    assert metrics(diagnosis)['eprt_rank_slow{rank="3"}'] == 0


def test_findings_are_of_one_view(tmp_path):
    """A returned rank does not inherit what was found of its predecessor."""
    pool: Any = SimpleNamespace(infos=[INFO], roster=SimpleNamespace(number=0, members=range(N)), members=[])

    async def go() -> None:
        diagnosis = Diagnosis(N, str(tmp_path))
        for window in range(1, 6):
            pool.members = members(totals(window, slow=3))
            await diagnosis.close_pool_window(pool)
        assert len(diagnosis.records(-1)) == 5 * N
        pool.roster.number = 1
        await diagnosis.close_pool_window(pool)
        assert diagnosis.records(-1) == []
        pool.members = members(totals(6, slow=3))
        await diagnosis.close_pool_window(pool)
        assert {record.num_calls for record in diagnosis.records(-1)} == {100}

    asyncio.run(go())


def test_a_rank_that_was_lost_before_the_first_window_is_not_silent(tmp_path, caplog):
    left = [rank for rank in range(N) if rank != 2]
    pool: Any = SimpleNamespace(infos=[INFO], roster=SimpleNamespace(number=1, members=left))

    async def go() -> None:
        diagnosis = Diagnosis(N, str(tmp_path))
        for window in (1, 2):
            pool.members = members({rank: totals(window)[rank] for rank in left})
            await diagnosis.close_pool_window(pool)
        assert diagnosis.num_windows == 1 and diagnosis.silent == ()

    asyncio.run(go())
    assert "silent" not in caplog.text


class HungPool:
    """A pool whose rank 3 was stopped some seconds ago, while all others waited for it; nothing has moved since."""

    def __init__(self, monkeypatch):
        self.now_s = 1000.0
        monkeypatch.setattr("eprt.serve.ranks.rank.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr("eprt.serve.diagnosis.hang_watch.time.monotonic", lambda: self.now_s)
        self.infos, self.members = [INFO], members(totals(2))
        for rank in self.members:
            rank.on_beat(Heartbeat(False, 0.0))
        self.roster = SimpleNamespace(number=0, members=range(N), changing=False)

    def beat(self, seconds: float) -> None:
        """seconds: for which rank 3 has stood still."""
        for rank in self.members:
            if rank.rank != 3:
                rank.on_beat(Heartbeat(False, 0.0, 3, "dispatch", seconds))

    async def look(self, diagnosis: Diagnosis, seconds: float) -> None:
        self.beat(seconds)
        for _ in range(3):  # more often than a look is late
            self.now_s += 0.3
            await diagnosis.look_for_hangs(self)  # type: ignore[arg-type]


@pytest.fixture
def hung(monkeypatch) -> HungPool:
    return HungPool(monkeypatch)


def test_a_hang_is_a_finding_in_the_metrics_and_in_the_log_while_it_lasts(tmp_path, caplog, hung):
    diagnosis = Diagnosis(N, str(tmp_path))

    async def go() -> None:
        await diagnosis.close_window(totals(1), INFO)
        await diagnosis.look_for_hangs(hung)  # type: ignore[arg-type]
        assert diagnosis.findings()["findings"] == []
        version = diagnosis.version
        hung.now_s += 0.9
        await hung.look(diagnosis, 1.0)
        await hung.look(diagnosis, 2.0)
        (finding,) = diagnosis.findings()["findings"]
        assert (finding["kind"], finding["rank"], finding["active"], finding["t_end"]) == ("hang", 3, True, None)
        assert (finding["host"], finding["pid"], finding["cost"]["lost"]) == ("host", 103, 1.0)
        assert diagnosis.version != version, "the page is told"
        shown = metrics(diagnosis)
        assert shown['eprt_rank_silent{rank="3"}'] == 1 and shown['eprt_rank_silent{rank="0"}'] == 0
        assert shown['eprt_findings{cause="unknown",kind="hang"}'] == 1
        assert (
            shown['eprt_rank_heartbeat_age_seconds{rank="3"}'] > 2 > shown['eprt_rank_heartbeat_age_seconds{rank="0"}']
        )
        await diagnosis.close_pool_window(hung, is_last=True)  # type: ignore[arg-type]

    with caplog.at_level(logging.WARNING):
        asyncio.run(go())
    (said,) = [r.message for r in caplog.records]
    assert said.startswith("diagnosis: rank 3 (pid 103, host host) hangs: rank 3 has given no heartbeat for ")
    report = analyse(tmp_path)
    assert [(f.kind, f.rank, f.active) for f in report.findings] == [("hang", 3, True)] and not report.problems
    ends = [(r.t_start, r.t_end) for r in read_log(tmp_path).records if r.rank == 0]
    assert [end for _, end in ends[:-1]] == [begin for begin, _ in ends[1:]], "windows leave no gap"


def test_a_hang_that_is_over_is_said_and_stays_a_past_finding(caplog, hung):
    diagnosis = Diagnosis(N)

    async def go() -> None:
        await diagnosis.close_window(totals(1), INFO)
        for seconds in (0.1, 1.0, 2.0, 3.0):
            await hung.look(diagnosis, seconds)
        for rank in hung.members:
            rank.on_beat(Heartbeat(False, 0.0))
        await diagnosis.look_for_hangs(hung)  # type: ignore[arg-type]
        await diagnosis.wait_analysed()
        await diagnosis.close_window(totals(4), INFO)
        await diagnosis.wait_analysed()

    with caplog.at_level(logging.WARNING):
        asyncio.run(go())
    assert "goes on after" in caplog.records[-1].message
    (finding,) = diagnosis.findings()["findings"]
    assert (finding["kind"], finding["rank"], finding["active"]) == ("hang", 3, False) and finding["t_end"] is not None
    assert metrics(diagnosis)['eprt_rank_silent{rank="3"}'] == 0


def test_a_new_view_knows_no_hang(hung):
    diagnosis = Diagnosis(N)

    async def go() -> None:
        for seconds in (0.1, 1.0, 2.0, 3.0):
            await hung.look(diagnosis, seconds)
        assert diagnosis.live_hangs()
        hung.roster.number = 1
        await diagnosis.close_pool_window(hung)  # type: ignore[arg-type]
        assert not diagnosis.live_hangs()

    asyncio.run(go())
