"""Hangs of a log: since when, until when, and who; also with two ranks, and when the log ends with the hang."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from eprt.diagnostics import Report, WindowRecord, analyse
from eprt.diagnostics.detect.facts import with_facts
from eprt.diagnostics.detect.hang_findings import logged_hangs
from eprt.diagnostics.log.standing import LoggedProcess, Standing
from eprt.diagnostics.windows.window_sums import WindowSums

from tests.unit.diagnostics.cases import matrices_of, record, synthetic_records, write_records

MISSING = Standing(12.0)


def waits(seconds: float, peer: int = 1, call: str = "dispatch") -> Standing:
    return Standing(0.3, peer, call, seconds)


def stood(window: int, standings: Mapping[int, Standing]) -> list[WindowRecord]:
    """A window without calls, in which the ranks stood so."""
    num_ranks = len(standings)
    return [
        replace(
            record(rank, window, num_ranks, num_calls=0),
            standing=standing,
            process=LoggedProcess(f"node{rank}", 4000 + rank),
        )
        for rank, standing in standings.items()
    ]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_hang_is_in_the_log_from_its_beginning_to_its_end(num_ranks):
    lines = synthetic_records(num_ranks, 5)
    others = {rank: waits(9.0) for rank in range(num_ranks)}
    hung = [*stood(5, {**others, 1: MISSING}), *stood(6, {**others, 1: replace(MISSING, heard_s=22.0)})]
    over = stood(7, {rank: Standing(0.2) for rank in range(num_ranks)})
    (hang,) = logged_hangs(matrices_of([*lines, *hung, *over]))
    finding = hang.finding
    assert (finding.kind, finding.rank, finding.first_window, finding.last_window) == ("hang", 1, 5, 7)
    assert hang.since_s == hung[0].t_end - 12.0 and hang.until_s == over[0].t_end
    assert "no heartbeat for 22.0 s" in finding.evidence and "on node1" in finding.advice and finding.score == 22.0


def test_a_log_that_ends_with_a_hang_has_it_as_what_lasts(tmp_path):
    """The server was given up at the deadline of its waits."""
    lines = [*synthetic_records(4, 5), *stood(5, {0: waits(27.0), 1: MISSING, 2: waits(27.1), 3: waits(26.9, 2)})]
    report = analyse(write_records(tmp_path, lines))
    first = report.findings[0]
    assert (first.kind, first.rank, first.active, first.t_end) == ("hang", 1, True, None)
    assert (first.host, first.pid, first.cost and first.cost.lost) == ("node1", 4001, 1.0)
    assert first.t_start == lines[-1].t_end - 27.1 and not report.problems
    assert report.state_WN[5].tolist() == [4] * 4, "no calls"


def test_the_calls_that_a_hang_held_up_are_no_finding_of_their_own():
    lines = synthetic_records(4, 5)
    hung = stood(5, {0: waits(9.0), 1: MISSING, 2: waits(9.0), 3: waits(9.0)})
    matrices = matrices_of([*lines, *hung, *synthetic_records(4, 9, first=6)])
    (hang,) = logged_hangs(matrices)

    def kept(rank: int, first: int, last: int) -> int:
        late = replace(hang.finding, kind="column", rank=rank, cause="comp", first_window=first, last_window=last)
        return sum(finding.kind == "column" for finding in with_facts([late], matrices))

    assert (hang.finding.first_window, hang.finding.last_window) == (5, 5)
    assert kept(1, 5, 6) == 0 and kept(0, 5, 5) == 0
    assert kept(1, 5, 8) == kept(1, 4, 6) == kept(0, 5, 6) == kept(1, 6, 8) == 1


def test_without_a_word_of_its_end_a_hang_ends_where_windows_go_on():
    lines = [*synthetic_records(4, 5), *stood(5, {0: waits(9.0), 1: MISSING}), *synthetic_records(4, 3, first=6)]
    (hang,) = logged_hangs(matrices_of(lines))
    assert hang.until_s == lines[-13].t_end and hang.finding.last_window == 5


def test_short_waits_of_the_same_moment_are_nobodys_fault():
    lines = [*synthetic_records(4, 5), *stood(5, {0: waits(9.0), 1: MISSING, 2: waits(0.2, 3), 3: Standing(0.1)})]
    assert [hang.finding.rank for hang in logged_hangs(matrices_of(lines))] == [1]


def test_two_hangs_in_turn_are_two():
    gone = {0: waits(9.0), 1: MISSING, 2: Standing(0.1)}
    other = {0: waits(9.0, 2), 1: waits(9.1, 2), 2: MISSING}
    lines = [*synthetic_records(3, 2), *stood(2, gone), *stood(3, other)]
    hangs = logged_hangs(matrices_of(lines))
    assert [(hang.finding.rank, hang.until_s) for hang in hangs] == [(1, lines[-1].t_end), (2, None)]


def test_a_circle_names_both_ends():
    lines = [*synthetic_records(2, 2), *stood(2, {0: waits(9.0, 1), 1: waits(9.0, 0)})]
    (hang,) = logged_hangs(matrices_of(lines))
    assert (hang.finding.rank, hang.finding.src, hang.finding.dst) == (None, 0, 1)


def test_what_only_waits_meanwhile_is_not_blamed():
    """Of the window in which rank 1 stood still, the waits alone say that everybody waited for rank 3."""
    lines = synthetic_records(8, 6)
    standings = {rank: waits(9.0, 3) for rank in range(8)} | {1: MISSING, 3: waits(9.0, 1)}
    for k in range(len(lines)):
        one = lines[k]
        if one.window == 5:
            long = [5e6 if j == 3 else us for j, us in enumerate(one.dispatch_wait_us)]
            lines[k] = replace(one, dispatch_wait_us=tuple(long), standing=standings[one.rank])
    assert [(f.kind, f.rank) for f in Report.of_records(lines).findings] == [("hang", 1)]
    bare = [replace(one, standing=None) for one in lines]
    assert ("column", 3) in [(f.kind, f.rank) for f in Report.of_records(bare).findings]


def test_a_thinned_log_keeps_its_hangs():
    lines = [*synthetic_records(4, 40), *stood(40, {0: waits(9.0), 1: MISSING})]
    sums = WindowSums(4, most=8)
    for one in lines:
        sums.add_record(one)
    (hang,) = logged_hangs(sums.matrices())
    assert hang.until_s is None and hang.finding.first_window == 40
