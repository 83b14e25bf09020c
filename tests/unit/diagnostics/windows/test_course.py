"""A course is JSON: rounded, and null where nothing is known."""

import json

import numpy as np
from eprt.diagnostics.windows.course import to_course


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
