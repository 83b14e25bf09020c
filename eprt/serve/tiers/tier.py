"""Tier: a promise of times to some of a server's requests, and how tiers are written: NAME=SECONDS,SECONDS.

Knows nothing of who gets which.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_TIERS = 16  # each is a label of metrics
_LONGEST_S = 3600.0
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
_FORM = "NAME=SECONDS_TO_FIRST_TOKEN,SECONDS_PER_TOKEN, as max=1.0,0.030"


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier of service."""

    name: str
    ttft_s: float  # within which the first token comes
    itl_s: float  # mean time between two tokens
    rank: int = 0  # 0 goes first

    def is_met(self, ttft_s: float, itl_s: float) -> bool:
        return ttft_s <= self.ttft_s and itl_s <= self.itl_s


def parse_tiers(given: Sequence[str]) -> tuple[Tier, ...]:
    """The one with the shortest time to first token is first. ValueError with one line that names value and remedy."""
    tiers = [_parse_tier(text) for text in given]
    for i, tier in enumerate(tiers):
        if any(other.name == tier.name for other in tiers[:i]):
            raise ValueError(f"{given[i]}: {tier.name} is given twice; give each tier once")
    if len(tiers) > MAX_TIERS:
        raise ValueError(f"{given[MAX_TIERS]}: is tier {MAX_TIERS + 1}; there may be {MAX_TIERS}")
    tiers.sort(key=lambda tier: (tier.ttft_s, tier.itl_s))
    return tuple(Tier(tier.name, tier.ttft_s, tier.itl_s, rank) for rank, tier in enumerate(tiers))


def _parse_tier(text: str) -> Tier:
    name, _, limits = text.partition("=")
    numbers = limits.split(",")
    if len(numbers) != 2:
        raise ValueError(f"{text}: must be {_FORM}")
    if not _NAME.fullmatch(name):
        raise ValueError(f"{text}: the name must be 1 to 32 lower-case letters, digits and . _ -, as max=1.0,0.030")
    if name == "auto":
        raise ValueError(f"{text}: auto is what a request says that leaves the choice to the server; take another name")
    seconds = [_parse_seconds(number) for number in numbers]
    if None in seconds:
        wrong = numbers[seconds.index(None)]
        raise ValueError(f"{text}: {wrong!r} must be seconds above 0 and at most {_LONGEST_S:g}; write {_FORM}")
    return Tier(name, *seconds)  # type: ignore[arg-type]


def _parse_seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds <= _LONGEST_S else None
