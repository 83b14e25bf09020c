"""Migrations are slots whose expert changes from one window of a rank to the next."""

from dataclasses import replace

from eprt.diagnostics import ExpertRows
from eprt.diagnostics.windows import migrations
from eprt.diagnostics.windows.migrations import Migrations

from tests.unit.diagnostics.cases import record, with_experts


def migrations_of(*records) -> Migrations:
    seen = Migrations()
    for one in records:
        seen.add_record(one)
    return seen


def test_a_slot_that_changes_its_expert_has_moved():
    before, after = ExpertRows(0, (1, 3), ((0, 1), (2, -1)), ((5, 5),) * 2), None
    after = replace(before, epoch=1, expert_of_slot=((0, 7), (2, 3)))
    seen = migrations_of(record(1, 4, experts=before), record(1, 6, experts=after), record(1, 7, experts=after))
    moves = [
        {"window": 6, "epoch": 1, "layer": 3, "rank": 1, "slot": 1, "before": -1, "after": 3},
        {"window": 6, "epoch": 1, "layer": 1, "rank": 1, "slot": 1, "before": 1, "after": 7},
    ]
    assert seen.to_json() == {"total": 2, "moves": moves}, "the newest first"


def test_what_comes_late_or_without_experts_or_for_other_layers_tells_nothing():
    other_layers = record(0, 3, experts=ExpertRows(0, (9,), ((8,),), ((1,),)))
    seen = migrations_of(with_experts(record(0, 2), 5), with_experts(record(0, 1), 6), record(0, 4), other_layers)
    assert seen.to_json() == {"total": 0, "moves": []}


def test_all_are_counted_and_the_newest_kept(monkeypatch):
    monkeypatch.setattr(migrations, "_MOST_MOVES", 3)
    seen = migrations_of(*(with_experts(record(0, window), window) for window in range(9)))
    document = seen.to_json()
    assert document["total"] == 8 and [move["window"] for move in document["moves"]] == [8, 7, 6]


def test_the_newest_window_is_the_newest_that_all_ranks_tell():
    seen = migrations_of(with_experts(record(0, 3, 2), 0), with_experts(record(0, 4, 2), 0))
    assert seen.newest_window(2) is None and Migrations().newest_window(1) is None
    seen.add_record(with_experts(record(1, 3, 2), 1))
    assert seen.newest_window(2) == 3
    seen.add_record(record(1, 4, 2))
    assert seen.newest_window(2) == 3
    seen.add_record(with_experts(record(1, 4, 2), 1))
    assert seen.newest_window(2) == 4


def test_ranks_that_miss_different_windows_share_an_older_one():
    windows = {0: (1, 2, 3, 5, 7, 9), 1: (2, 3, 4, 6, 8, 9), 2: (1, 2, 3, 4, 6, 7, 8)}
    seen = migrations_of(*(with_experts(record(rank, w, 3), 0) for rank in windows for w in windows[rank]))
    assert seen.newest_window(3) == 3
    apart = migrations_of(with_experts(record(0, 5, 2), 0), with_experts(record(1, 4, 2), 0))
    assert apart.newest_window(2) is None
