"""Usage: what a rank had to work with in a window, and what it worked on: the fields of `usage` in a record.

All are totals over the window, so windows can be added up. A rank writes those that it can measure. Knows no rank and
draws no conclusion.
"""

from collections.abc import Mapping
from typing import Any

USAGE = (
    "cpu_us",  # processor time of the rank's process, all threads
    "run_wait_us",  # its main thread was ready to run and had no core, or its cgroup's quota was used up
    "throttled_us",  # its cgroup, or one above, had used up its quota (cpu.stat)
    "num_throttled",  # periods of that quota in which this happened
    "attention_us",  # time in attention; on CPUs only
    "tokens",  # of its own requests, computed in this window
    "context_tokens",  # tokens that attention had to read, added up over the rows of each step
    "steps",  # in which some rank computed
    "step_us",  # time of these steps; pauses in which no rank has work are left out
    "gpu_mcycles",  # million cycles of the GPU's SM clock: over the window's seconds this is MHz
    "gpu_thermal_us",  # the GPU's clock was lowered because of heat
    "gpu_power_us",  # or because of a limit of power
)


def check_usage(usage: Any, most: int) -> dict[str, float]:
    """Those of USAGE that are there; names of later versions are left out. ValueError for what is not an amount."""
    if not isinstance(usage, Mapping):
        raise ValueError("usage is not an object")
    kept = {name: usage[name] for name in USAGE if name in usage}
    for name, value in kept.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
            raise ValueError(f"usage.{name}={str(value)[:60]}: must be a finite number from 0 to {most:.0e}")
    return kept
