"""LoggedProcess and Standing: which process a rank is, and what it stood at when a window ended while nothing moved.

Parts of a record (events.py). Knows nothing of who is to blame (detect/hangs.py).
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LoggedProcess:
    """Where a rank runs."""

    host: str
    pid: int
    gpu: str | None = None  # as the driver names it, with its number; None: it computes on CPUs

    @staticmethod
    def from_json(data: Any) -> "LoggedProcess":
        """ValueError where it is not one."""
        if not isinstance(data, dict) or not isinstance(data.get("host"), str) or not _is_count(data.get("pid")):
            raise ValueError("process is not a host and a pid")
        gpu = data.get("gpu")
        return LoggedProcess(data["host"][:256], data["pid"], gpu[:256] if isinstance(gpu, str) else None)


@dataclass(frozen=True)
class Standing:
    """One rank at the end of a window, in which some rank kept the others waiting."""

    heard_s: float  # seconds since its latest heartbeat
    waits_for: int | None = None  # the rank that it was waiting for; None: for nobody, or it is not known any more
    call: str = ""  # in which call
    waited_s: float = 0.0  # for how long by then
    state: str = (
        "steps"  # what its latest heartbeat said: one of STATES; or of PROCESS_STATES, where that was looked up
    )

    @staticmethod
    def from_json(data: Any) -> "Standing":
        """ValueError where it is not one."""
        if not isinstance(data, dict):
            raise ValueError("standing is not an object")
        for name in ("heard_s", "waited_s"):
            value = data.get(name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1e9:
                raise ValueError(f"standing.{name}={str(value)[:60]}: must be seconds")
        waits_for = data.get("waits_for")
        if waits_for is not None and not _is_count(waits_for):
            raise ValueError(f"standing.waits_for={str(waits_for)[:60]}: must be a rank or null")
        call, state = str(data.get("call", ""))[:80], str(data.get("state", ""))[:20]
        return Standing(float(data["heard_s"]), waits_for, call, float(data["waited_s"]), state)


# steps: in a step; computes: likewise, and its process uses a core; asleep: it waits for requests.
STATES = ("steps", "computes", "asleep")
# What the kernel says of a process: stopped by a signal, by a debugger, waiting for a disk, ended.
PROCESS_STATES = ("stopped", "traced", "disk", "ended")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
