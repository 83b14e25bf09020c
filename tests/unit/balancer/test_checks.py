"""Errors name the place and the value."""

import numpy as np
import pytest
from eprt.balancer.checks import check_values, is_int


def test_the_first_bad_value_is_named():
    values_LE = np.array([[1, 2, 3], [4, -5, -6]])
    check_values(values_LE > 4, values_LE, "load", ("layer", "expert"), "must be at most 4")
    with pytest.raises(ValueError, match=r"^load\[layer 1, expert 1\] = -5: must be at least 0 \(2 such values\)$"):
        check_values(values_LE < 0, values_LE, "load", ("layer", "expert"), "must be at least 0")
    with pytest.raises(ValueError, match=r"^speed\[GPU 2\] = 3: is odd$"):
        check_values(np.array([False, False, True]), values_LE[0], "speed", ("GPU",), "is odd")


def test_booleans_and_floats_are_no_integers():
    assert is_int(3, 3) and is_int(np.int64(3), 1)
    assert not is_int(2, 3) and not is_int(True, 0) and not is_int(3.0, 1)
