"""Windows cut from running totals: what is late, missing, or too little."""

from eprt.serve.diagnosis.collector import Collector
from eprt.serve.ranks.messages import WaitTotals
from tests.unit.serve.diagnosis.cases import INFO, N


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
