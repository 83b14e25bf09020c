"""The detector: which columns, rows and points of the wait matrices stand out, and in which windows. Knows no causes.

It compares logarithms with medians per tier (effects.py), and scores runs of windows by how noise persists (chance.py,
runs.py). With two or three ranks a median cannot distinguish a rank from its link; there only a rank that all others
wait for, while it waits for nobody, is reported.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from ..windows.baseline import Baseline
from ..windows.matrices import WindowMatrices
from .chance import CLIP_Z, HIGH_Z, RAISED_Z, Chance
from .effects import FLOOR_US, Effects, ratio_of
from .lateness import Lateness, LinkLateness, spared_us
from .past import Limits, find_changes, tail_of_changes
from .runs import WindowRun, find_best_runs, least_score
from .sightings import Outliers, Place, Sighting, sightings_of, without_twins
from .topology import LinkTopology

MIN_RANKS_FOR_MEDIANS = 4
MIN_RANK_RATIO, MIN_POINT_RATIO = 1.5, 1.6  # over the whole run; less is not worth anybody's time
SHORT_POINT_RATIO = 1.0  # over the number of windows, added for points: a short run needs a larger one
BURST_Z, BURST_RATIO = 8.0, 4.0  # a rank that stands out so far is reported from a single window
ALONE_Z, ALONE_RATIO = 6.5, 2.5  # the same where the log has one window only
POINT_MARGIN, RANK_MARGIN = 0.5, 0.7  # on top of the least score: how noise persists is itself an estimate
LONG_RUN, LONG_MARGIN = 6, 0.5  # windows in which a link may be raised without being high, and the score that it needs
STEADY = 0.75  # of a run's windows are raised
RANK_LIMITS = Limits(min_ratio=1.35, short_ratio=0.3, min_windows=3, min_peer_ratio=1.1)  # of a change against the past
# Free of what a rank inherits from others, whose noise no estimate knows, so no margin is needed.
WORK_LIMITS = replace(RANK_LIMITS, margin=0.0)
MESSAGE_LIMITS = Limits(min_ratio=1.25, short_ratio=0.4, min_windows=3, min_peer_ratio=1.1, margin=0.0)
LINK_LIMITS = Limits(min_ratio=1.5, short_ratio=1.0, min_windows=4, min_peer_ratio=1.2)
# Among fewer ranks a slow link, and what comes late behind it, are much of its tier, and move what is usual there.
FEW_RANKS = 8
MAX_RUNS = 5  # of one place, those that are too unsteady to be reported included
MIN_RATIO_OF_FEW, MIN_WAIT_US_OF_FEW = 3.0, 20.0  # with two or three ranks


def detect(
    matrices: WindowMatrices, topology: LinkTopology | None = None, baseline: Baseline | None = None
) -> tuple[Outliers, list[Sighting]]:
    topology = topology or LinkTopology.from_nodes(matrices.node_of_rank_N)
    effects = Effects.from_waits(matrices.wait_us_WNN, topology.alike_NN)
    outliers = Outliers(
        column_z_WN=effects.column_WN / effects.column_error_W1,
        column_ratio_WN=ratio_of(effects.column_WN),
        row_z_WN=effects.row_WN / effects.row_error_W1,
        row_ratio_WN=ratio_of(effects.row_WN),
        point_z_WNN=effects.point_z_WNN,
        point_ratio_WNN=ratio_of(effects.point_WNN),
    )
    if matrices.num_ranks < MIN_RANKS_FOR_MEDIANS:
        return outliers, list(_awaited_by_all(matrices.wait_us_WNN))
    chance = Chance.from_links(outliers.links()[1])
    sightings = list(sightings_of(outliers, partial(_find_runs, chance)))
    if baseline is not None:
        effects = Effects.from_waits(baseline.wait_us_WNN, topology.alike_NN).followed_by(effects)
    changes = _find_changes(matrices, topology, baseline, effects, chance)
    return outliers, [*sightings, *(s for s in changes if not any(s.is_seen_as(other) for other in sightings))]


def _find_changes(
    matrices: WindowMatrices, topology: LinkTopology, baseline: Baseline | None, effects: Effects, chance: Chance
) -> Iterator[Sighting]:
    """Places that are higher than in their own past."""
    phases = [matrices.dispatch_us_WNN, matrices.combine_us_WNN]
    if baseline is not None:
        before = (baseline.dispatch_us_WNN, baseline.combine_us_WNN)
        phases = [np.concatenate(both) for both in zip(before, phases, strict=True)]
    num_before = len(phases[0]) - len(matrices.window_W)
    lateness = Lateness.from_waits(*phases)
    found = []
    works_WN = np.full(lateness.column_us_WN.shape, np.nan)
    works_WN[num_before:] = spared_us(matrices.blocked_us_WN)
    for kind, late_us_WN, limits in (
        ("column", works_WN, WORK_LIMITS),
        ("column", lateness.messages_us_WN, MESSAGE_LIMITS),
        ("column", lateness.column_us_WN, RANK_LIMITS),
        ("row", lateness.row_us_WN, RANK_LIMITS),
    ):
        effect_WN, usual_us_WN = (
            (effects.column_WN, lateness.awaited_us_WN)
            if kind == "column"
            else (effects.row_WN, lateness.waiting_us_WN)
        )
        ratio = partial(lateness.ratio, usual_us_WN)
        ranks, part_WN = Chance(chance.memory, tail_of_changes(late_us_WN)), late_us_WN / lateness.usual_us
        for run, size in find_changes(part_WN, effect_WN, ranks, limits, num_before, ratio):
            first, last = run.first - num_before, run.last - num_before
            found.append(Sighting(Place(kind, run.place, None, None), first, last, run.score, size, is_change=True))
    yield from without_twins(found)
    pairs_P2 = np.argwhere(~np.eye(effects.column_WN.shape[1], dtype=bool))
    effect_WP = effects.point_WNN[:, pairs_P2[:, 0], pairs_P2[:, 1]]
    changes = list(find_changes(effect_WP, effect_WP, chance, LINK_LIMITS, num_before))
    if effects.column_WN.shape[1] < FEW_RANKS:
        links = LinkLateness.from_waits(phases[0] + phases[1], topology.alike_NN, pairs_P2)
        changes += find_changes(links.late_WP, effect_WP, chance, LINK_LIMITS, num_before, links.ratio, deviation=1.0)
    points = []
    for run, ratio in changes:
        src, dst = pairs_P2[run.place].tolist()
        first, last = run.first - num_before, run.last - num_before
        points.append(Sighting(Place("point", None, src, dst), first, last, run.score, ratio, is_change=True))
    yield from without_twins(points)


def _find_runs(
    chance: Chance, z_WP: np.ndarray, ratio_WP: np.ndarray, is_point: bool
) -> Iterator[tuple[WindowRun, float]]:
    """Runs that are sure and large enough, with their ratio."""
    num_windows, num_places = z_WP.shape
    min_score = least_score(num_places) + (POINT_MARGIN if is_point else RANK_MARGIN)
    if not is_point:  # a median over the ranks has no tails, and follows no single link
        chance = Chance(chance.memory)
    left_WP = z_WP.copy()
    reported_WP = np.zeros(z_WP.shape, dtype=bool)
    for _ in range(MAX_RUNS if num_windows > 1 else 0):
        runs = find_best_runs(left_WP, chance, min_score)
        for run in runs:
            at = slice(run.first, run.last + 1)
            size = float(np.nanmedian(ratio_WP[at, run.place]))
            length = run.last - run.first + 1
            min_ratio = MIN_POINT_RATIO + SHORT_POINT_RATIO / length if is_point else MIN_RANK_RATIO
            z_W = z_WP[at, run.place]
            is_raised_W = z_W >= RAISED_Z
            is_steady = np.mean(is_raised_W[~np.isnan(z_W)]) >= STEADY
            if not is_steady and not is_point:
                left_WP[at, run.place] = np.where(is_raised_W, z_W, -CLIP_Z)  # perhaps two runs, with calm between
                continue
            left_WP[at, run.place] = -CLIP_Z  # it interrupts other runs
            if is_point:
                is_long = length >= LONG_RUN and run.score >= min_score + LONG_MARGIN
                is_sure = is_long or chance.is_enough(z_W, num_places, num_windows)
            else:
                is_sure = (z_W >= HIGH_Z).sum() >= 2
            if size >= min_ratio and is_sure and is_steady:
                reported_WP[at, run.place] = True
                yield run, size
        if not runs:
            break
    if not is_point:
        min_z, min_ratio = (BURST_Z, BURST_RATIO) if num_windows > 1 else (ALONE_Z, ALONE_RATIO)
        yield from _join_bursts(z_WP, ratio_WP, (z_WP >= min_z) & (ratio_WP >= min_ratio) & ~reported_WP)


def _join_bursts(z_WP: np.ndarray, ratio_WP: np.ndarray, high_WP: np.ndarray) -> Iterator[tuple[WindowRun, float]]:
    """Windows that are high by themselves; those of a place that follow each other are one run."""
    for place in np.flatnonzero(high_WP.any(axis=0)).tolist():
        windows = np.flatnonzero(high_WP[:, place])
        for part in np.split(windows, np.flatnonzero(np.diff(windows) > 1) + 1):
            score, size = float(np.median(z_WP[part, place])), float(np.median(ratio_WP[part, place]))
            yield WindowRun(place, int(part[0]), int(part[-1]), score), size


def _awaited_by_all(wait_us_WNN: np.ndarray) -> Iterator[Sighting]:
    """The rule for two or three ranks: every other rank waits for it at least thrice as long as it waits for anyone.
    Without medians there is no scale either; a spread of 25 % per wait is assumed."""
    num_windows, num_ranks = wait_us_WNN.shape[:2]
    for rank in range(num_ranks if num_ranks > 1 else 0):
        others = np.arange(num_ranks) != rank
        awaited_W = wait_us_WNN[:, others, rank].min(axis=1)
        own_W = wait_us_WNN[:, rank, others].max(axis=1)
        ratio_W = (awaited_W + FLOOR_US) / (own_W + FLOOR_US)
        seen = np.flatnonzero((ratio_W >= MIN_RATIO_OF_FEW) & (awaited_W >= MIN_WAIT_US_OF_FEW))
        if len(seen) >= min(2, num_windows):
            size = float(np.median(ratio_W[seen]))
            score = math.log(size) / (0.25 * math.sqrt(2))
            yield Sighting(Place("column", rank, None, None), int(seen[0]), int(seen[-1]), score, size)
