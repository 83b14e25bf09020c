"""Windows cut from running totals: what is late, missing, or too little."""

import time
from dataclasses import replace

import msgspec
import pytest
from eprt.diagnostics.log.standing import LoggedProcess, Standing

from eprt.serve.diagnosis.collector import Collector
from eprt.serve.ranks.messages import WaitTotals
from tests.unit.serve.diagnosis.cases import INFO, N, totals


def test_a_window_of_a_few_calls_goes_on():
    def few(calls: int) -> dict[int, WaitTotals]:
        zeros: list = [0] * N
        return {rank: WaitTotals(calls, zeros, zeros, zeros, zeros, 0.0) for rank in range(N)}

    collector = Collector(INFO.node_of_rank, ())
    assert collector.close_window(few(9)) is None
    both = collector.close_window(few(18))
    assert both is not None and [(r.window, r.num_calls) for r in both.records] == [(0, 18)] * N and not both.silent
    last = collector.close_window(few(20), is_last=True)
    assert last is not None and [(r.window, r.num_calls) for r in last.records] == [(1, 2)] * N
    assert last.records[0].t_start == both.records[0].t_end


def test_a_window_has_what_was_added_since_the_one_before():
    collector = Collector(INFO.node_of_rank, INFO.moe_layers, first_window=7, since_s=1.0)
    windows = [collector.close_window(totals(window)) for window in (1, 3)]
    assert [window.records[0].window for window in windows if window] == [7, 8]
    first, second = (window.records[2] for window in windows if window)
    assert (first.num_calls, second.num_calls) == (100, 200) and first.t_start == 1.0
    assert second.t_start == first.t_end and second.recv_tokens == (100,) * N
    assert second.experts is not None and second.experts.rows == ((200, 202), (202, 204))
    assert second.experts.expert_of_slot == ((4, 5), (4, 5)) and second.experts.epoch == 1


def test_a_clock_that_was_set_back_ends_no_window_before_its_begin():
    collector = Collector(INFO.node_of_rank, INFO.moe_layers, since_s=1e12)
    window = collector.close_window(totals(1))
    assert window is not None and all(record.t_start == record.t_end for record in window.records)


def test_ranks_without_calls_are_silent_only_where_others_made_some():
    collector = Collector(INFO.node_of_rank, INFO.moe_layers)
    nobody = collector.close_window(totals(0))
    assert nobody is not None and nobody.records == nobody.silent == ()
    some = collector.close_window({rank: total for rank, total in totals(1).items() if rank != 3})
    assert some is not None and some.silent == (3,) and len(some.records) == N - 1


def test_windows_do_not_span_a_change_of_the_ranks():
    collector = Collector(INFO.node_of_rank, INFO.moe_layers)
    collector.close_window(totals(1))
    left = {rank: total for rank, total in totals(2).items() if rank != 3}
    collector.skip_window(left, list(left))
    without = collector.close_window({rank: total for rank, total in totals(3).items() if rank != 3})
    assert without is not None and without.silent == (), "a lost rank is not silent"
    assert {record.rank: record.num_calls for record in without.records} == dict.fromkeys(left, 100)
    fresh = {**totals(4), 3: totals(0)[3]}
    collector.skip_window(fresh, range(N))
    back = collector.close_window({**totals(5), 3: totals(1)[3]})
    assert back is not None and {record.num_calls for record in back.records} == {100}, "a new process counts from 0"
    assert len(back.records) == N


def wait_for(peer: int, seconds: float, call: str = "dispatch") -> Standing:
    return Standing(0.1, peer, call, seconds)


def test_a_wait_belongs_to_the_window_in_which_it_lasts_and_is_counted_once():
    collector = Collector(INFO.node_of_rank, INFO.moe_layers, since_s=1.0)
    first = collector.close_window(totals(1), waiting={0: wait_for(3, 2.0), 1: wait_for(3, 1.0, "combine")})
    assert first is not None
    plain = Collector(INFO.node_of_rank, INFO.moe_layers, since_s=1.0).close_window(totals(1))
    assert plain is not None
    assert first.records[0].dispatch_wait_us[3] == plain.records[0].dispatch_wait_us[3] + 2e6
    assert first.records[1].combine_wait_us[3] == plain.records[1].combine_wait_us[3] + 1e6
    assert first.records[2] == replace(plain.records[2], t_start=first.records[2].t_start, t_end=first.records[2].t_end)
    ended = totals(2)
    ended[0].dispatch_wait_us[3] += 5e6  # it lasted three seconds more
    second = collector.close_window(ended)
    assert second is not None and second.records[0].dispatch_wait_us[3] == pytest.approx(3e6 + 500, rel=0.01)
    assert second.records[1].combine_wait_us[3] == 0, "it was broken off and never counted"


def test_a_window_without_calls_lasts_as_long_as_ranks_wait():
    collector = Collector(INFO.node_of_rank, INFO.moe_layers, since_s=1.0)
    assert collector.close_window(totals(0), waiting={0: wait_for(3, 2.0)}) is None
    after = collector.close_window(totals(1))
    assert after is not None and after.records[0].t_start == 1.0


def test_while_a_rank_holds_the_others_up_windows_end_and_have_a_record_of_each_rank(monkeypatch):
    collector = Collector(INFO.node_of_rank, INFO.moe_layers)
    collector.processes = {3: LoggedProcess("h", 7)}
    collector.close_window(totals(1))
    now_s = time.time()
    monkeypatch.setattr("eprt.serve.diagnosis.collector.time.time", lambda: now_s)
    now_s += 9
    standings = {rank: wait_for(3, 2.0) for rank in range(N)} | {3: Standing(2.5)}
    waiting = {rank: stood for rank, stood in standings.items() if rank != 3}
    hung = collector.close_window(totals(1), waiting=waiting, standings=standings)
    assert hung is not None and hung.silent == () and [r.rank for r in hung.records] == list(range(N))
    assert {r.num_calls for r in hung.records} == {0} and collector.window == 2
    assert [r.standing for r in hung.records] == [standings[rank] for rank in range(N)]
    assert hung.records[0].dispatch_wait_us[3] == pytest.approx(2e6) and hung.records[3].process == LoggedProcess(
        "h", 7
    )
    now_s += 9
    later = {rank: wait_for(3, 5.0) for rank in waiting}
    again = collector.close_window(totals(1), waiting=later, standings={**later, 3: Standing(5.5)})
    assert again is not None and again.records[0].dispatch_wait_us[3] == pytest.approx(3e6)
    assert again.records[0].t_start == hung.records[0].t_end


def test_no_window_holds_more_of_a_wait_than_time(monkeypatch):
    """A heartbeat tells of a wait half a second late: the window in which it began may have ended."""
    collector = Collector(INFO.node_of_rank, INFO.moe_layers)
    now_s = time.time()
    monkeypatch.setattr("eprt.serve.diagnosis.collector.time.time", lambda: now_s)
    collector.close_window(totals(1))
    now_s += 1.5
    hung = collector.close_window(totals(1), waiting={0: wait_for(3, 2.0)}, standings={0: wait_for(3, 2.0)})
    assert hung is not None and hung.records[0].dispatch_wait_us[3] == pytest.approx(1.5e6)
    now_s += 1.0
    ended = totals(2)
    ended[0].dispatch_wait_us[3] += 2.5e6
    rest = collector.close_window(ended)
    assert rest is not None and rest.records[0].dispatch_wait_us[3] == pytest.approx(0.5e6, rel=0.01)


def test_a_rank_that_has_reported_nothing_yet_has_a_record_too():
    collector = Collector(INFO.node_of_rank, INFO.moe_layers)
    some = {rank: total for rank, total in totals(1).items() if rank != 3}
    hung = collector.close_window(some, standings={rank: Standing(2.5) for rank in range(N)})
    assert hung is not None and {r.rank: r.num_calls for r in hung.records}[3] == 0


def test_usage_is_cut_into_windows():
    collector = Collector(INFO.node_of_rank, INFO.moe_layers)

    def used(window: int) -> dict[int, WaitTotals]:
        usage = {"cpu_us": 5.0 * window, "steps": 2.0 * window}
        return {rank: msgspec.structs.replace(total, usage=usage) for rank, total in totals(window).items()}

    first, second = collector.close_window(used(1)), collector.close_window(used(3))
    assert first is not None and first.records[0].usage == {"cpu_us": 5, "steps": 2}
    assert second is not None and second.records[0].usage == {"cpu_us": 10, "steps": 4}
