"""What is counted of each tier's requests."""

import pytest
from prometheus_client import CollectorRegistry

from eprt.serve.tiers.metrics import RequestService, TierCounts
from eprt.serve.tiers.tier import Tier

TIER = Tier("max", 1.0, 0.1)


class Counted:
    """Counts of one tier."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.counts = TierCounts([TIER], self.registry)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"eprt_tier_{name}", {"tier": "max", **labels})


@pytest.mark.parametrize(
    "ttft_s, last_s, outcome",
    [
        (0.9, 1.8, "met"),
        (1.1, 2.0, "late_first_token"),
        (0.9, 1.91, "slow_tokens"),
        (1.1, 2.11, "late_and_slow"),
    ],
)
def test_a_request_is_within_both_limits_or_not(ttft_s, last_s, outcome):
    counted = Counted()
    RequestService(TIER, 1, counted.counts).end_sequence("stop", 11, ttft_s, last_s)
    assert counted.value("requests_total", outcome=outcome) == 1
    assert counted.value("tokens_total", outcome=outcome) == 11
    assert counted.value("time_to_first_token_seconds_count") == 1
    assert counted.value("time_per_token_seconds_sum") == pytest.approx((last_s - ttft_s) / 10)
    assert counted.value("requests_total", outcome="refused") == 0, "each series is there from the start"
    assert counted.value("limit_seconds", of="token") == 0.1


def test_the_slowest_sequence_speaks_for_a_request():
    counted = Counted()
    service = RequestService(TIER, 3, counted.counts)
    service.end_sequence("stop", 2, 0.1, 0.15)
    service.end_sequence("length", 2, 1.2, 1.25)
    assert counted.value("requests_total", outcome="late_first_token") == 0
    service.end_sequence("stop", 1, 0.1, 0.1)
    assert counted.value("requests_total", outcome="late_first_token") == 1
    assert counted.value("tokens_total", outcome="late_first_token") == 5


def test_who_leaves_and_who_is_lost_is_counted_apart():
    counted = Counted()
    RequestService(TIER, 1, counted.counts).end_sequence("abort", 3, 0.1, 0.2)
    service = RequestService(TIER, 2, counted.counts)
    service.end_sequence("error", 0, 0.1, 0.1)
    service.fail()
    service.fail()
    assert counted.value("requests_total", outcome="aborted") == 1
    assert counted.value("requests_total", outcome="failed") == 1
    assert counted.value("time_to_first_token_seconds_count") == 0
