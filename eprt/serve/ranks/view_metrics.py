"""Metrics of the ranks' views: who takes part, how many were lost, and how long others waited for that.

Knows nothing of what the ranks compute (metrics.py).
"""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from eprt.serve.ranks.roster import STATES, Roster
from eprt.serve.ranks.sequences import Sequences
from eprt.serve.series import series


class ViewCollector:
    """Series of one server's roster."""

    def __init__(self, roster: Roster, sequences: Sequences):
        self._roster, self._sequences = roster, sequences

    def collect(self) -> Iterable[Metric]:
        roster = self._roster
        yield GaugeMetricFamily(
            "eprt_view", "Number of the ranks' view; grows when a rank goes or comes", roster.number
        )
        states = [((rank, state), slot.state == state) for rank, slot in enumerate(roster.slots) for state in STATES]
        text = "1 for the state that the rank is in"
        yield series(GaugeMetricFamily, "eprt_rank_state", text, ("rank", "state"), states)
        yield CounterMetricFamily("eprt_ranks_lost", "Ranks that were lost while others served on", roster.num_lost)
        text = "Sequences that went on on another rank than theirs"
        yield CounterMetricFamily("eprt_requests_replayed", text, self._sequences.num_moved)
        text = "Experts, of all layers together, that are read while the ranks serve without them"
        yield GaugeMetricFamily("eprt_missing_experts", text, roster.num_missing)
        text = "From a view's beginning until all its ranks have entered it"
        yield SummaryMetricFamily("eprt_view_change_seconds", text, roster.num_changes, roster.change_s)
