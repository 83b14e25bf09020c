"""What a rank used: known names are kept, amounts are checked."""

import math

import pytest
from eprt.diagnostics.log.usage import USAGE, check_usage


def test_known_names_are_kept_in_their_order():
    assert list(check_usage({"steps": 3, "cpu_us": 1.5, "later": "x"}, 10)) == ["cpu_us", "steps"]
    assert check_usage(dict.fromkeys(USAGE, 0), 10) == dict.fromkeys(USAGE, 0)


@pytest.mark.parametrize("value", [-1, 11, math.nan, math.inf, True, "1", None])
def test_what_is_no_amount_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"usage\.tokens="):
        check_usage({"tokens": value}, 10)


def test_only_objects_are_usage():
    with pytest.raises(ValueError, match="not an object"):
        check_usage([1], 10)
