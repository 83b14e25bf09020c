"""Windows cut from running totals: what is late, missing, or too little."""

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
