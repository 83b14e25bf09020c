"""Tiers as they are written on the command line."""

import pytest

from eprt.serve.flags import parse_options
from eprt.serve.options import OptionError
from eprt.serve.tiers.tier import Tier, parse_tiers
from tests.unit.cases import MODEL


def test_the_shortest_time_to_first_token_goes_first():
    assert parse_tiers(["base=2.0,0.070", "max=1,30e-3", "pro=1.5,0.05"]) == (
        Tier("max", 1.0, 0.03, 0),
        Tier("pro", 1.5, 0.05, 1),
        Tier("base", 2.0, 0.07, 2),
    )
    assert parse_tiers([]) == ()


@pytest.mark.parametrize(
    "given, words",
    [
        (["max"], "max: must be NAME=SECONDS_TO_FIRST_TOKEN,SECONDS_PER_TOKEN, as max=1.0,0.030"),
        (["max=1"], "max=1: must be NAME="),
        (["max=1,2,3"], "max=1,2,3: must be NAME="),
        (["max=one,2"], "max=one,2: 'one' must be seconds above 0 and at most 3600"),
        (["max=1,0"], "max=1,0: '0' must be seconds above 0"),
        (["max=1,-1"], "'-1' must be seconds above 0"),
        (["max=1,nan"], "'nan' must be seconds above 0"),
        (["max=4000,1"], "'4000' must be seconds above 0 and at most 3600"),
        (["=1,1"], "=1,1: the name must be 1 to 32 lower-case letters"),
        (["Max=1,1"], "Max=1,1: the name must be"),
        (["auto=1,1"], "auto=1,1: auto is what a request says"),
        (["a=1,1", "b=1,1", "a=2,2"], "a=2,2: a is given twice; give each tier once"),
        ([f"t{i}=1,1" for i in range(17)], "t16=1,1: is tier 17; there may be 16"),
    ],
)
def test_a_tier_that_cannot_be_is_named(given, words):
    with pytest.raises(ValueError) as caught:
        parse_tiers(given)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def options(*flags: str):
    return parse_options(["--model", str(MODEL), *flags])


def test_flags():
    given = options("--tier", "base=2,0.07", "--tier", "max=1,0.03", "--default-tier", "max")
    assert [tier.name for tier in given.tiers] == ["max", "base"] and given.default_tier == "max"
    assert options().tiers == ()
    with pytest.raises(OptionError, match="--tier x: must be NAME="):
        options("--tier", "x")
    with pytest.raises(OptionError, match="--default-tier gold: must be one of max, base"):
        options("--tier", "base=2,0.07", "--tier", "max=1,0.03", "--default-tier", "gold")
    with pytest.raises(OptionError, match="--default-tier gold: there are no tiers; give --tier too"):
        options("--default-tier", "gold")
