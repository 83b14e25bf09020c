"""Checks of arrays, numbers and fields whose errors name the place and the value. Knows nothing of what they mean."""

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


NUMBER = int | float


def check_fields(data: dict[str, Any], name: str, kinds: dict[str, Any]) -> None:
    """ValueError names the first field that is missing or of another type than kinds says. A number must be finite and
    fit in 64 bits; a bool is none."""
    for field, kind in kinds.items():
        if field not in data:
            raise ValueError(f"{name} has no {field!r}")
        value = data[field]
        is_other = isinstance(value, bool) or not isinstance(value, kind)
        if is_other or (isinstance(value, NUMBER) and not abs(value) < 2**63):
            wanted = getattr(kind, "__name__", "number")
            raise ValueError(f"{name} has {field} = {repr(value)[:60]}, which is no {wanted}")
