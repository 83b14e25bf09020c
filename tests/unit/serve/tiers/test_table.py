"""Which tier a request gets, and what the engine is told of it."""

import pytest

from eprt.engine.sampling_params import SamplingParams
from eprt.serve.errors import ApiError
from eprt.serve.tiers.table import TierTable, in_tier
from eprt.serve.tiers.tier import parse_tiers

TIERS = parse_tiers(["max=1,0.03", "pro=1.5,0.05", "base=2,0.07"])


def chosen(asked: str | None, of_key: str | None = None, default: str = "") -> str:
    tier = TierTable(TIERS, default).choose_tier(asked, of_key)
    assert tier is not None
    return tier.name


@pytest.mark.parametrize(
    "asked, of_key, default, name",
    [
        (None, None, "", "base"),
        (None, None, "pro", "pro"),
        (None, "max", "pro", "max"),
        ("auto", None, "pro", "pro"),
        ("auto", "base", "pro", "base"),
        ("default", None, "pro", "pro"),
        ("default", "max", "pro", "pro"),
        ("default", "base", "pro", "base"),
        ("priority", None, "", "max"),
        ("priority", "pro", "", "pro"),
        ("flex", None, "max", "base"),
        ("flex", "max", "", "base"),
        ("pro", None, "", "pro"),
        ("pro", "pro", "", "pro"),
        ("base", "max", "", "base"),
    ],
)
def test_a_request_gets_what_it_and_its_key_say(asked, of_key, default, name):
    assert chosen(asked, of_key, default) == name


def test_a_tier_may_have_one_of_openais_names():
    table = TierTable(parse_tiers(["fast=1,1", "priority=2,2", "flex=3,3", "slow=4,4"]))
    names = [tier.name for word in ("priority", "flex") if (tier := table.choose_tier(word)) is not None]
    assert names == ["priority", "flex"]


def test_what_a_key_does_not_open_is_refused_by_name():
    with pytest.raises(ApiError) as caught:
        chosen("max", "pro")
    error = caught.value
    assert (error.status, error.code, error.param) == (403, "tier_not_allowed", "service_tier")
    assert error.message == 'service_tier="max": this key is for pro and the tiers behind it'


def test_unknown_tiers_are_refused_with_those_that_there_are():
    with pytest.raises(ApiError) as caught:
        chosen("scale")
    error = caught.value
    assert (error.status, error.param) == (400, "service_tier")
    assert error.message == 'service_tier="scale": must be one of auto, default, priority, flex, max, pro, base'


def test_without_tiers_only_words_that_ask_for_nothing_are_taken():
    table = TierTable()
    assert [table.choose_tier(word) for word in (None, "auto", "default")] == [None] * 3
    with pytest.raises(ApiError, match='service_tier="flex": this server has no tiers'):
        table.choose_tier("flex")


def test_no_priority_of_a_request_passes_the_tier_before():
    def priority(rank: int, own: int) -> int:
        return in_tier(SamplingParams(priority=own), TIERS[rank]).priority

    most = (1 << 47) - 1
    ordered = [priority(rank, own) for rank in range(3) for own in (-most, -1, 0, 1, most)]
    assert ordered == sorted(ordered) and len(set(ordered)) == len(ordered)
    assert priority(0, 0) == 0
    with pytest.raises(ApiError, match=f"priority={most + 1}: with tiers of service it must be in"):
        priority(1, most + 1)
