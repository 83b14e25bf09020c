"""Checks of arrays and numbers whose errors name the place and the value. Knows nothing of what they mean."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def check_values(bad: np.ndarray, values: np.ndarray, name: str, axes: Sequence[str], rule: str) -> None:
    """ValueError with the first of the bad values, such as "load[layer 1, expert 2] = -1: must be at least 0".

    bad: bool, the shape of values.
    axes: a word for each index of the array.
    """
    places = np.argwhere(bad)
    if len(places):
        index = tuple(places[0].tolist())
        place = ", ".join(f"{axis} {i}" for axis, i in zip(axes, index, strict=True))
        more = f" ({len(places)} such values)" if len(places) > 1 else ""
        raise ValueError(f"{name}[{place}] = {values[index]}: {rule}{more}")


def is_int(value: Any, least: int) -> bool:
    """Whether value is an integer, not a bool, of at least `least`."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)
