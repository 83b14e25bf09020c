"""Facts of findings: process, times, whether it lasts, bursts; and the order: lasting, then what costs most."""

from dataclasses import replace

import pytest
from eprt.diagnostics import Finding, Report
from eprt.diagnostics.detect.cost import Cost
from eprt.diagnostics.detect.facts import in_order
from eprt.diagnostics.log.standing import LoggedProcess

from tests.unit.diagnostics.cases import late, link, synthetic_records

START_S = 1.76e9  # of synthetic jobs


def findings_of(num_windows: int, *faults, ranks: int = 8) -> list[Finding]:
    records = synthetic_records(ranks, num_windows, faults=faults)
    named = [replace(r, process=LoggedProcess(f"node{r.rank // 4}", 100 + r.rank, "H200")) for r in records]
    return list(Report.of_records(named).findings)


def test_a_finding_that_lasts_has_a_beginning_and_no_end():
    (finding,) = findings_of(12, late(3, windows=(4, 11)))
    assert (finding.active, finding.burst, finding.t_start, finding.t_end) == (True, False, START_S + 40, None)
    assert (finding.host, finding.pid, finding.gpu) == ("node0", 103, "H200")


def test_a_finding_that_is_over_has_an_end():
    (finding,) = findings_of(12, late(3, windows=(4, 7)))
    assert (finding.active, finding.t_start, finding.t_end) == (False, START_S + 40, START_S + 80)


def test_one_window_without_it_does_not_end_a_finding():
    (finding,) = findings_of(12, late(3, windows=(4, 10)))
    assert finding.active
    (finding,) = findings_of(12, late(3, windows=(4, 9)))
    assert not finding.active


def test_a_link_is_looked_for_at_its_sender():
    (finding,) = findings_of(12, link(2, 6, 8.0))
    assert (finding.kind, finding.subject, finding.host, finding.pid) == ("point", 6, "node1", 106)


def test_a_burst_is_told_as_one():
    (finding,) = findings_of(12, late(3, 20.0, windows=(5, 5)))
    assert finding.burst and not finding.active and finding.confidence <= 0.9
    assert finding.advice.startswith("one window only, so nothing to repair unless it comes back")
    (only,) = findings_of(1, late(3, 20.0))
    assert not only.burst, "a log of one window cannot tell"


def one(active: bool, lost: float | None, score: float, burst: bool = False) -> Finding:
    cost = None if lost is None else Cost(lost)
    base = Finding("column", 1, None, None, "comp", score, 2.0, 0, 1, 1.0, "", "")
    return replace(base, active=active, cost=cost, burst=burst)


def test_lasting_comes_before_past_and_cost_before_score():
    ordered = [
        one(True, 0.5, 5.0),
        one(True, 0.1, 9.0),
        one(True, None, 99.0),
        one(True, None, 98.0),
        one(True, 0.9, 99.0, burst=True),
        one(False, 0.9, 99.0),
    ]
    assert in_order(ordered[::-1]) == ordered


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_costly_fault_is_named_before_a_cheap_one(num_ranks):
    faults = [late(1, 8.0)] if num_ranks == 2 else [late(5, 3.0), late(1, 8.0)]
    first = findings_of(12, *faults, ranks=num_ranks)[0]
    assert first.rank == 1 and first.cost is not None and first.cost.lost > 0
