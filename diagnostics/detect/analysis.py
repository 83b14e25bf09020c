"""Findings: which rank or link is at fault, since when and why. Knows no files; ignores what only echoes a fault."""

import math
from dataclasses import asdict, dataclass

from ..windows.matrices import WindowMatrices
from . import detector, zscore
from .evidence import ADVICE, Evidence
from .sightings import Outliers, Sighting
from .yardstick import Yardstick

METHODS = {"robust": detector.detect, "zscore": zscore.detect}
# A rank that gets a link's data late is late itself by as much, so that the others wait for it in turn.
ECHO_RATIOS = (0.2, 1.6)
LIGHT_LOAD = 0.67  # a rank with fewer tokens of its own comes early and waits; that is not a fault
# A rank with more tokens of its own comes late by up to as much; that is a finding (mixed) only when it is much.
HEAVY_LOAD, HEAVY_RATIO, MOST_LATE = 1.2, 1.75, 2.5


@dataclass(frozen=True)
class Finding:
    """A rank or link that is at fault, as eprt.findings/1 has it."""

    kind: str  # "column" or "row" (of `rank`) or "point" (`src` waits for `dst`)
    rank: int | None
    src: int | None
    dst: int | None
    cause: str  # "comm", "comp" or "mixed"
    score: float  # how many standard errors it stands out
    ratio: float  # its wait over the usual
    first_window: int  # in which it was seen
    last_window: int
    confidence: float  # 1 - the chance that noise alone brings such a score to any place in any run of the log
    evidence: str
    advice: str

    def to_json(self) -> dict:
        return asdict(self)


def find_faults(matrices: WindowMatrices, method: str = "robust") -> tuple[Outliers, list[Finding]]:
    """Findings, most certain first. method: one of METHODS."""
    if method not in METHODS:
        raise ValueError(f"method={method!r}: must be {' or '.join(METHODS)}")
    outliers, sightings = METHODS[method](matrices)
    yardstick = Yardstick(matrices, outliers)
    kept = _without_parts([s for s in sightings if not _is_uneven_load(s, yardstick)])
    kept, echoed = _without_echoes(kept, yardstick)
    findings = [_make_finding(sighting, yardstick, echoed.get(id(sighting))) for sighting in kept]
    return outliers, sorted(findings, key=lambda finding: -finding.score)


def _make_finding(sighting: Sighting, yardstick: Yardstick, echo: int | None) -> Finding:
    evidence = Evidence.gather(yardstick, sighting)
    matrices, cause, text = yardstick.matrices, evidence.cause(), evidence.text()
    if echo is not None:
        text += f"; rank {echo} is late to the others because of it"
    if sighting.place.kind == "column" and (waiter := yardstick.only_waiter(sighting)) is not None:
        text += f"; only rank {waiter} tells, so it may be the link between the two"
    return Finding(
        **sighting.place._asdict(),
        cause=cause,
        score=round(sighting.score, 2),
        ratio=round(sighting.ratio, 2),
        first_window=int(matrices.window_W[sighting.first]),
        last_window=int(matrices.last_window_W[sighting.last]),
        confidence=round(_confidence(sighting, matrices), 4),
        evidence=text,
        advice=ADVICE[sighting.place.kind, cause],
    )


def _confidence(sighting: Sighting, matrices: WindowMatrices) -> float:
    """Places x runs x the normal tail, at three quarters of the score: the scale may be that much off."""
    num_ranks, num_windows = matrices.num_ranks, len(matrices.window_W)
    places = num_ranks * (num_ranks - 1) if sighting.place.kind == "point" else num_ranks
    tail = 0.5 * math.erfc(0.75 * sighting.score / math.sqrt(2))
    return 1 - min(1.0, places * num_windows * tail)


def _is_uneven_load(sighting: Sighting, yardstick: Yardstick) -> bool:
    """Whether the sizes of the ranks' own batches explain it: every server has that, and the router evens it out."""
    if sighting.place.kind == "row":
        return yardstick.own_tokens(sighting) <= LIGHT_LOAD
    if sighting.place.kind == "column":
        own = yardstick.own_tokens(sighting)
        if math.isinf(own):  # idle ranks come at once and wait for those that compute: compare those with each other
            return yardstick.beyond_peers(sighting) < HEAVY_RATIO
        return own >= HEAVY_LOAD and sighting.ratio < max(HEAVY_RATIO, min(own, MOST_LATE))
    return False


def _without_echoes(sightings: list[Sighting], yardstick: Yardstick) -> tuple[list[Sighting], dict[int, int]]:
    """Drops a rank's column where one slow link into the rank explains it. The link need not be sure enough to be
    reported: in a fault's first window its wider echo often is. Returns the others, and link's id -> late rank."""
    points = [s for s in sightings if s.place.kind == "point"]
    dropped, echoed = set(), {}
    for column in (s for s in sightings if s.place.kind == "column"):
        seen = [p for p in points if p.place.src == column.place.rank and p.overlaps(column)]
        for point in [*seen, *yardstick.links_into(column)]:
            share = yardstick.excess_us(column) / max(1e-9, yardstick.excess_us(point))
            if ECHO_RATIOS[0] <= share <= ECHO_RATIOS[1]:
                dropped.add(id(column))
                echoed[id(point)] = column.place.rank
    return [s for s in sightings if id(s) not in dropped], echoed


def _without_parts(sightings: list[Sighting]) -> list[Sighting]:
    """Drops links of a slow rank, and the slow rank's own row: neither is a finding of its own."""
    ranks = [s for s in sightings if s.place.kind != "point"]
    columns = [s for s in ranks if s.place.kind == "column"]

    def is_part(s: Sighting) -> bool:
        if s.place.kind == "row":
            return any(c.place.rank == s.place.rank and c.overlaps(s) for c in columns)
        ends = {"column": s.place.dst, "row": s.place.src}
        return s.place.kind == "point" and any(r.place.rank == ends[r.place.kind] and r.overlaps(s) for r in ranks)

    return [s for s in sightings if not is_part(s)]
