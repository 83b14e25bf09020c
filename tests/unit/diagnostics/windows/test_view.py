"""What the page reads: a line of JSON and float32 arrays at a multiple of four; null where a course knows nothing."""

import json

import numpy as np
import pytest
from eprt.diagnostics.windows.view import WindowView, pack, to_course


@pytest.mark.parametrize("name", ["", "a", "ab", "abc", "é"])
def test_arrays_start_at_a_multiple_of_four(name):
    arrays = np.arange(6.0).reshape(2, 3), np.array([np.nan])
    head, _, rest = pack({"name": name}, *arrays).partition(b"\n")
    assert (len(head) + 1) % 4 == 0 and json.loads(head) == {"name": name}
    np.testing.assert_array_equal(np.frombuffer(rest, "<f4"), [0, 1, 2, 3, 4, 5, np.nan])


def test_a_header_that_json_does_not_have_is_refused():
    with pytest.raises(ValueError):
        pack({"t": float("nan")})


def test_a_view_says_what_it_holds():
    view = WindowView(7, 1.0, 2.0, np.zeros((3, 2, 2)), np.full(2, 5.0), np.array([100.0, 0.0]))
    head, _, rest = view.pack().partition(b"\n")
    planes = ["dispatch", "combine", "tokens"]
    assert json.loads(head) == {"window": 7, "t_start": 1.0, "t_end": 2.0, "num_ranks": 2, "planes": planes}
    assert np.frombuffer(rest, "<f4").tolist() == [0.0] * 12 + [5.0, 5.0, 100.0, 0.0]


def test_a_course_is_json_with_null_for_what_is_not_known():
    own_CS = np.array([[1.23456789, np.nan], [2.0, np.inf]])
    course = to_course(("wait", "tokens"), [0, 4], [3, 5], own_CS, 2 * own_CS)
    assert json.loads(json.dumps(course, allow_nan=False)) == {
        "first": [0, 4],
        "last": [3, 5],
        "series": {"wait": [1.2346, 2.0], "tokens": [None, None]},
        "usual": {"wait": [2.4691, 4.0], "tokens": [None, None]},
    }


def test_a_course_without_windows_has_its_series():
    course = to_course(("wait",), [], [], np.zeros((0, 1)), np.zeros((0, 1)))
    assert course == {"first": [], "last": [], "series": {"wait": []}, "usual": {"wait": []}}
