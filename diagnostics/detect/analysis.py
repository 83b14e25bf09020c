"""Findings: which rank or link is at fault, since when and why. Knows no files; ignores what only echoes a fault."""

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from ..windows.baseline import Baseline
from ..windows.matrices import WindowMatrices
from . import detector, zscore
from .chance import Chance
from .cost import Cost
from .early import EarlyRank, early_rank, split_early
from .evidence import ADVICE, HIGH_COMPUTE, Evidence
from .folding import fold, join_nodes, without_explained, without_paths_of, without_small_echoes, without_wide_echoes
from .mates import fold_with_mates
from .sightings import Outliers, Sighting
from .topology import LinkTopology
from .wide import find_wide
from .wide_evidence import WIDE, WideEvidence
from .yardstick import Yardstick

METHODS = {"robust": detector.detect, "zscore": zscore.detect}
# A rank that gets a link's data late is late itself by as much, so that the others wait for it in turn.
ECHO_RATIOS = (0.2, 1.6)
LONGER_WAIT = 1.2  # of a link's, over that of its tier, and over what it was
OWN_PART = 0.5  # of a late rank's lateness; less is inherited from others
LIGHT_LOAD = 0.67  # a rank with fewer tokens of its own comes early and waits; that is not a fault
# A rank with more tokens of its own comes late by up to as much; that is a finding (mixed) only when it is much.
HEAVY_LOAD, HEAVY_RATIO, MOST_LATE = 1.2, 1.75, 2.5


@dataclass(frozen=True)
class Finding:
    """A rank or link that is at fault, as eprt.findings/1 has it."""

    # "column" or "row" (of `rank`), "point" (`src` waits for `dst`), "node", "path" (`nodes`), "tier", "job", or "hang"
    # (of `rank`; or `src` and `dst` wait for each other)
    kind: str
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
    nodes: tuple[int, ...] = ()  # one of a "node", two of a "path"
    tier: str | None = None  # which links, of a "tier"
    members: tuple[dict[str, Any], ...] = ()  # kind, rank, src, dst, nodes and tier of what a wide finding is made of
    # facts.py fills in the following.
    host: str | None = None  # of the rank that it is about (of a link: of the sender), as far as it is logged
    pid: int | None = None
    gpu: str | None = None
    t_start: float | None = None  # Unix time
    t_end: float | None = None  # None while it lasts
    active: bool = True  # whether it lasts, at the end of the log
    burst: bool = False  # seen in one window alone, of several
    cost: Cost | None = None  # None where it cannot be told

    @property
    def subject(self) -> int | None:
        """The rank to look at: of a link the sender; None where it is about several."""
        return self.dst if self.rank is None else self.rank

    def to_json(self) -> dict:
        return {**asdict(self), "nodes": list(self.nodes), "members": [_plain(member) for member in self.members]}


def _plain(member: dict[str, Any]) -> dict[str, Any]:
    return {**member, "nodes": list(member["nodes"])}


@dataclass(frozen=True, eq=False)
class Analysis:
    """What was found in a run."""

    outliers: Outliers
    findings: tuple[Finding, ...]  # most certain first
    early: tuple[EarlyRank, ...] = ()  # no faults


def find_faults(matrices: WindowMatrices, method: str = "robust") -> tuple[Outliers, list[Finding]]:
    """Findings, most certain first. method: one of METHODS."""
    analysis = analyse_matrices(matrices, method)
    return analysis.outliers, list(analysis.findings)


def analyse_matrices(
    matrices: WindowMatrices,
    method: str = "robust",
    topology: LinkTopology | None = None,
    baseline: Baseline | None = None,
) -> Analysis:
    """topology: of the links; None: learned. baseline: of an earlier run, to compare with besides the run's own past.
    ValueError for a method that is none of METHODS, and for a baseline of another job."""
    if method not in METHODS:
        raise ValueError(f"method={method!r}: must be {' or '.join(METHODS)}")
    if baseline is not None:
        baseline.check_fits(matrices.node_of_rank_N.tolist())
    topology = topology or LinkTopology.learn(matrices.wait_us_WNN, matrices.node_of_rank_N)
    outliers, sightings = METHODS[method](matrices, topology, baseline)
    yardstick, node_N = Yardstick(matrices, outliers, topology), matrices.node_of_rank_N
    early: list[Sighting] = []
    if method == "robust":
        sightings = [s for s in sightings if not _is_inherited(s, yardstick) and not _is_as_usual(s, yardstick)]
        early, sightings = split_early(sightings, yardstick)
    kept = _without_parts([s for s in sightings if not _is_uneven_load(s, yardstick)], node_N)
    kept, echoed = _without_echoes(kept, yardstick)
    if method == "robust":
        kept = fold_with_mates(without_small_echoes(kept), yardstick, partial(fold, node_of_rank_N=node_N))
        links = Chance.from_links(outliers.links()[1]) if matrices.num_ranks > 1 else None
        wide = find_wide(matrices, topology, baseline, links)
        kept += [s for s in wide if not any(s.is_seen_as(other) for other in kept)]
        is_slower = lambda s: WideEvidence.gather(yardstick, s, baseline).compute_ratio >= HIGH_COMPUTE  # noqa: E731
        kept = without_wide_echoes(kept, is_slower, yardstick.ratio_without)
        kept = join_nodes(
            without_paths_of(kept, is_slower), np.unique(node_N).tolist(), yardstick.waits_between, is_slower
        )
        kept = without_explained(kept, [s for s in kept if s.place.kind in WIDE], node_N)
        jobs = [s for s in kept if s.place.kind == "job"]
        early = [s for s in early if not any(s.overlaps(job) for job in jobs)]
    findings = [_make_finding(sighting, yardstick, echoed.get(id(sighting)), baseline) for sighting in kept]
    return Analysis(
        outliers,
        tuple(sorted(findings, key=lambda finding: -finding.score)),
        tuple(early_rank(s, yardstick) for s in early),
    )


def _make_finding(sighting: Sighting, yardstick: Yardstick, echo: int | None, baseline: Baseline | None) -> Finding:
    if sighting.place.kind in WIDE:
        evidence = WideEvidence.gather(yardstick, sighting, baseline)
    else:
        evidence = Evidence.gather(yardstick, sighting)
    matrices, cause, text = yardstick.matrices, evidence.cause(), evidence.text()
    if echo is not None:
        text += f"; rank {echo} is late to the others because of it"
    if sighting.place.kind == "column" and (waiter := yardstick.only_waiter(sighting)) is not None:
        text += f"; only rank {waiter} tells, so it may be the link between the two"
    return Finding(
        **sighting.place._asdict(),
        members=tuple(member._asdict() for member in sighting.members),
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
    places = num_ranks * (num_ranks - 1) if sighting.place.kind in ("point", "path") else num_ranks
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


def _is_inherited(sighting: Sighting, yardstick: Yardstick) -> bool:
    """Whether a rank is late because of others: neither does it work longer, nor are its messages late."""
    if sighting.place.kind != "column":
        return False
    part, over_usual = yardstick.own_lateness(sighting)
    least = detector.MESSAGE_LIMITS.least_ratio(sighting.last - sighting.first + 1)
    return part < OWN_PART or 1 + over_usual < least


def _is_as_usual(sighting: Sighting, yardstick: Yardstick) -> bool:
    """Whether nobody waits longer at a link than at others of its tier, or than ever. A rank that comes early shows
    its links as they are: not slow, but slower than the rank is early."""
    if sighting.place.kind != "point":
        return False
    beside_others, beside_past = yardstick.beside_tier(sighting)
    return beside_others < LONGER_WAIT or beside_past < LONGER_WAIT


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


def _without_parts(sightings: list[Sighting], node_of_rank_N: np.ndarray) -> list[Sighting]:
    """Drops links of a slow rank, and the slow rank's own row: neither is a finding of its own. On a node of two or
    three ranks, a slow rank is most of what another one waits for inside the node: that other's row goes too."""
    small = {int(node) for node, num in zip(*np.unique(node_of_rank_N, return_counts=True)) if num < 4}
    ranks = [s for s in sightings if s.place.kind != "point"]
    columns = [s for s in ranks if s.place.kind == "column"]

    def is_part(s: Sighting) -> bool:
        if s.place.kind == "row":
            near = node_of_rank_N[s.place.rank]
            own = [s.place.rank] + [
                c.place.rank for c in columns if near in small and node_of_rank_N[c.place.rank] == near
            ]
            return any(c.place.rank in own and c.overlaps(s) for c in columns)
        ends = {"column": s.place.dst, "row": s.place.src}
        return s.place.kind == "point" and any(r.place.rank == ends[r.place.kind] and r.overlaps(s) for r in ranks)

    return [s for s in sightings if not is_part(s)]
