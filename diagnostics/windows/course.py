"""Courses: values over time of one rank or one link, beside the usual ones, as JSON for the page."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def to_course(
    names: Sequence[str], first_C: list[int], last_C: list[int], own_CS: np.ndarray, usual_CS: np.ndarray
) -> dict[str, Any]:
    """C columns of one or more windows, S series.

    names: of the series.
    first_C, last_C: first and last window of each column.
    own_CS, usual_CS: values; NaN, which JSON does not have, becomes null.
    """
    return {
        "first": first_C,
        "last": last_C,
        "series": {name: _rounded(own_CS[:, s]) for s, name in enumerate(names)},
        "usual": {name: _rounded(usual_CS[:, s]) for s, name in enumerate(names)},
    }


def _rounded(values: np.ndarray) -> list[float | None]:
    return [round(float(value), 4) if np.isfinite(value) else None for value in values]
