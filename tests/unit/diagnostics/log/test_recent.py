"""The latest windows of a job, within bounds."""

from eprt.diagnostics.log.recent import RecentWindows

from tests.unit.diagnostics.cases import record, with_experts

N = 6


def records_of(window: int) -> list:
    return [with_experts(record(rank, window, N), *range(4)) for rank in range(N)]


def test_old_windows_make_room():
    records = [one for window in range(40) for one in records_of(window)]
    recent = RecentWindows(most_windows=1000, most_values=20 * N * (4 * N + 8))
    for one in records:
        recent.add_record(one)
    assert {r.window for r in recent.records_after(-1)} == set(range(20, 40))
    assert not recent.add_record(records[0]) and not recent.add_record(records[-1]) and len(recent) == 20
    few = RecentWindows(most_windows=1000, most_values=1)
    for one in records:
        few.add_record(one)
    assert len(few) == 6, "enough to analyse, however large"


def test_no_more_windows_than_asked_for_are_kept():
    recent = RecentWindows(most_windows=3)
    assert recent.oldest == 0 and not len(recent)
    for window in (4, 5, 6, 7):
        for one in records_of(window):
            assert recent.add_record(one)
    assert recent.oldest == 5 and len(recent) == 3 and recent.records_of(4) == []


def test_records_come_by_window_and_rank():
    recent = RecentWindows(most_windows=10)
    for window, rank in ((2, 3), (1, 0), (2, 1), (1, 5)):
        assert recent.add_record(record(rank, window, N))
    assert [(r.window, r.rank) for r in recent.records_after(0)] == [(1, 0), (1, 5), (2, 1), (2, 3)]
    assert [r.rank for r in recent.records_of(2)] == [1, 3] and recent.records_after(2) == []
