"""CurrentWait: the wait that a rank is in, for those who ask from outside while it lasts. Knows no deadlines."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CurrentWait:
    """There is one only once a wait has lasted some milliseconds, so that short ones cost nothing."""

    peer: int  # the rank that is waited for: the first of those whose data are missing
    phase: str  # of which call, in words
    since_s: float  # when it began, of time.monotonic()
