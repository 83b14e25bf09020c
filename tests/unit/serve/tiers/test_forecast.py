"""When a request would get its first token, and who is sent away for that."""

import pytest

from eprt.engine.router import Router
from eprt.serve.errors import ApiError
from eprt.serve.tiers.forecast import Forecast, check_step
from eprt.serve.tiers.tier import parse_tiers

MAX, BASE = parse_tiers(["max=1,0.03", "base=2,0.07"])


def learned(max_running: int = 8) -> Forecast:
    """A thousand prompt tokens take a second; a step takes 10 ms, and 5 ms for each request."""
    forecast = Forecast(Router(1, 99), (MAX, BASE), max_running)
    for i in range(200):
        num_tokens = 100 + 37 * (i % 20)
        forecast.start(f"{i}", 0, MAX, num_tokens)
        forecast.on_token(f"{i}", 1e-3 * num_tokens)
        forecast.end(f"{i}", 2.0)
        forecast.steps.add_step(1 + i % 9, 10, 0.01 + 5e-3 * (1 + i % 9))
    return forecast


def test_times_are_those_that_were_measured():
    forecast = learned()
    assert forecast.first_token_s(0, 0, 500) == pytest.approx(0.5, rel=0.05)
    forecast.start("a", 0, BASE, 300)
    assert forecast.first_token_s(0, 1, 500) == pytest.approx(0.8, rel=0.05)
    assert forecast.first_token_s(0, 0, 500) == pytest.approx(0.5, rel=0.05), "base does not go before max"


def test_who_comes_too_late_is_told_when_to_come_back():
    forecast = learned()
    forecast.start("a", 0, MAX, 700)
    forecast.check_first_token(MAX, 0, 200)
    with pytest.raises(ApiError) as caught:
        forecast.check_first_token(MAX, 0, 600)
    error = caught.value
    assert (error.status, error.code, error.retry_after_s) == (429, "tier_busy", 1)
    assert error.message.startswith("tier max: the first token would come after 1.3 s; its limit is 1 s")
    forecast.check_first_token(BASE, 0, 600)


def test_nobody_is_sent_away_who_would_be_late_alone():
    forecast = learned()
    forecast.start("a", 0, MAX, 700)
    forecast.check_first_token(MAX, 0, 5000)


def test_nothing_is_refused_before_it_was_measured():
    forecast = Forecast(Router(1, 99), (MAX, BASE), 8)
    forecast.check_first_token(MAX, 0, 100_000)
    check_step([forecast], MAX, 100_000)


def test_rows_that_are_taken_by_others_are_waited_for():
    forecast = learned(max_running=2)
    before_s = forecast.first_token_s(0, 1, 100)
    for i in range(3):
        forecast.start(f"r{i}", 0, MAX, 1)
        forecast.on_token(f"r{i}", 0.001)
    # Two of four must end first, two at a time in 2 s.
    assert forecast.first_token_s(0, 1, 100) - before_s == pytest.approx(2.0, rel=0.1)
    assert forecast.first_token_s(0, 0, 100) > before_s, "of its own tier"


def with_requests(forecast: Forecast, tier, num: int) -> Forecast:
    for i in range(num):
        forecast._router.assign(f"s{i}", [1] * 4)
        forecast.start(f"s{i}", 0, tier, 0)
    return forecast


def test_a_step_that_takes_too_long_for_a_tier_takes_nobody_more():
    few, many = with_requests(learned(), MAX, 2), with_requests(learned(), MAX, 6)
    check_step([few], MAX, 4)
    check_step([many, few], MAX, 4)
    with pytest.raises(
        ApiError, match=r"tier max: with one more request a token would take 0.045 s; its limit is 0.03"
    ):
        check_step([many], MAX, 4)
    with pytest.raises(ApiError, match=r"tier base: .*; the limit of tier max, which is served now, is 0.03 s"):
        check_step([many], BASE, 4)
    check_step([with_requests(learned(), BASE, 6)], BASE, 4)


def test_a_group_that_is_too_slow_for_a_tier_serves_it_all_the_same():
    forecast = Forecast(Router(1, 99), (MAX, BASE), 8)
    for rows in range(1, 100):
        forecast.steps.add_step(rows % 9, 10, 0.05 + 1e-3 * (rows % 9))
    check_step([with_requests(forecast, MAX, 6)], MAX, 4)
