"""Metrics of views: the state of each rank, losses, and the time that changes took."""

from types import SimpleNamespace

from prometheus_client import CollectorRegistry, generate_latest

from eprt.serve.ranks.roster import Roster
from eprt.serve.ranks.view_metrics import ViewCollector


def test_a_lost_rank_shows_in_the_states_the_view_and_the_counts():
    roster, sequences = Roster(2, lambda rank, message: None, lambda: 0), SimpleNamespace(num_moved=3)
    roster.set_state(0, "ready")
    roster.set_state(1, "gone")
    roster.begin([True, False])
    roster.num_lost, roster.num_changes, roster.change_s = 1, 2, 0.5
    registry, collected = CollectorRegistry(), sequences  # type: Any
    registry.register(ViewCollector(roster, collected))
    lines = [line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]
    values = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
    assert values["eprt_view"] == 1 and values["eprt_ranks_lost_total"] == 1
    assert values["eprt_requests_replayed_total"] == 3
    assert values["eprt_view_change_seconds_count"] == 2 and values["eprt_view_change_seconds_sum"] == 0.5
    assert values['eprt_rank_state{rank="1",state="gone"}'] == 1 == values['eprt_rank_state{rank="0",state="ready"}']
    assert sum(value for name, value in values.items() if name.startswith("eprt_rank_state")) == 2
