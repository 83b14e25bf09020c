"""From wait matrices to findings: which rank or link stands out, how far, since when, and what it means.

Waits are compared as logarithms, so that "twice as long" counts the same on fast and slow links, and links inside a
node only with links inside a node. What a rank adds to all who wait for it (its column), what it waits for everyone
(its row) and what is left of a single link are separated with medians, so that the faulty rank does not shift the
yardstick. The scale is the median absolute deviation of what is left. A finding must stand out both statistically and
in size.

With two or three ranks a median cannot tell a rank from its link; there only a rank that all others wait for, while it
waits for nobody, is reported.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from .evidence import Evidence, Place, advice
from .matrices import WindowMatrices

METHODS = ("robust", "zscore")
MIN_RANKS_FOR_MEDIANS = 4
MIN_SCORE, MIN_RATIO = 5.0, 1.5  # of a rank's column or row
MIN_POINT_SCORE, MIN_POINT_RATIO = 6.0, 2.0
MIN_SIGMA = 0.05  # a calmer log than 5 % is not believed
MIN_RATIO_OF_FEW, MIN_WAIT_US_OF_FEW = 3.0, 20.0  # with two or three ranks
FLOOR_US = 1.0  # waits below the cost of looking are noise


@dataclass(frozen=True)
class Finding:
    """kind: "column" or "row" (of `rank`) or "point" (`src` waits for `dst`).
    cause: "comm", "comp" or "mixed". score: how many standard errors it stands out. ratio: its wait over the usual.
    confidence: 1 - the chance that the largest of all candidates scores this high by noise of any distribution
    (Cantelli's inequality, summed over the candidates). first_window, last_window: where it was seen.
    """

    kind: str
    rank: int | None
    src: int | None
    dst: int | None
    cause: str
    score: float
    ratio: float
    first_window: int
    last_window: int
    confidence: float
    evidence: str
    advice: str

    def to_json(self) -> dict:
        return asdict(self)


class _Mark(NamedTuple):
    """How far one place stands out in one window."""

    place: Place
    score: float
    ratio: float


@dataclass(frozen=True, eq=False)
class Outliers:
    """How far each place stands out in each window: z in standard errors, ratio of its wait to the usual one.

    NaN where there are no data (and on the diagonal of points). Columns: everyone waits for the rank. Rows: the rank
    waits for everyone. Points: [w][i][j], rank i waits for rank j longer than column and row explain.
    """

    column_z_WN: np.ndarray
    column_ratio_WN: np.ndarray
    row_z_WN: np.ndarray
    row_ratio_WN: np.ndarray
    point_z_WNN: np.ndarray
    point_ratio_WNN: np.ndarray

    @staticmethod
    def of(effects: list["_Effects"]) -> "Outliers":
        sigma_W = np.array([e.sigma for e in effects])
        error_W1 = (sigma_W * math.sqrt(math.pi / 2 / max(1, effects[0].num_ranks - 1)))[:, None]
        column_WN, row_WN = np.array([e.column_N for e in effects]), np.array([e.row_N for e in effects])
        point_WNN = np.array([e.point_NN for e in effects])
        return Outliers(
            column_WN / error_W1, np.exp(column_WN), row_WN / error_W1, np.exp(row_WN),
            point_WNN / sigma_W[:, None, None], np.exp(point_WNN),
        )  # fmt: skip


def find_outliers(matrices: WindowMatrices, method: str = "robust") -> tuple[Outliers, list[Finding]]:
    """Findings, most certain first. A fault must show in two windows, unless there are fewer than three."""
    if method not in METHODS:
        raise ValueError(f"method={method!r}: must be {' or '.join(METHODS)}")
    effects = [_Effects.of(wait_us_NN, matrices.node_of_rank_N) for wait_us_NN in matrices.wait_us_WNN]
    seen: dict[Place, dict[int, _Mark]] = {}
    for w, (effect, wait_us_NN) in enumerate(zip(effects, matrices.wait_us_WNN)):
        marks = effect.marks() if matrices.num_ranks >= MIN_RANKS_FOR_MEDIANS else _awaited_by_all(wait_us_NN)
        for mark in marks:
            seen.setdefault(mark.place, {})[w] = mark
    needed = 1 if len(effects) < 3 else 2
    findings = [_finding(matrices, effects, p, marks) for p, marks in seen.items() if len(marks) >= needed]
    return Outliers.of(effects), sorted(findings, key=lambda finding: -finding.score)


def _finding(matrices: WindowMatrices, effects: list["_Effects"], place: Place, marks: dict[int, _Mark]) -> Finding:
    windows = sorted(marks)
    evidence = Evidence.gather(
        matrices,
        windows,
        place,
        row_ratio_N=np.exp(np.median([effects[w].row_N for w in windows], axis=0)),
        ratio=float(np.median([marks[w].ratio for w in windows])),
    )
    return Finding(
        **place._asdict(),
        cause=evidence.cause(),
        score=round(float(np.median([marks[w].score for w in windows])), 2),
        ratio=round(evidence.ratio, 2),
        first_window=int(matrices.window_W[windows[0]]),
        last_window=int(matrices.window_W[windows[-1]]),
        confidence=round(_confidence(place, [marks[w].score for w in windows], matrices), 4),
        evidence=evidence.text(),
        advice=advice(place.kind, evidence.cause()),
    )


def _confidence(place: Place, scores: list[float], matrices: WindowMatrices) -> float:
    """1 - (candidates) x (choices of these windows) x (product of the windows' tail bounds 1 / (1 + score^2))."""
    num_ranks = matrices.num_ranks
    candidates = num_ranks * (num_ranks - 1) if place.kind == "point" else num_ranks
    log_chance = math.log(candidates) + math.log(math.comb(len(matrices.window_W), len(scores)))
    log_chance -= sum(math.log1p(score * score) for score in scores)
    return 1 - math.exp(min(0.0, log_chance))


def _awaited_by_all(wait_us_NN: np.ndarray) -> Iterator[_Mark]:
    """The rule for two or three ranks: every other rank waits for it at least thrice as long as it waits for anyone.

    Without medians there is no scale either; a spread of 25 % per wait is assumed.
    """
    for rank in range(len(wait_us_NN)):
        others = np.arange(len(wait_us_NN)) != rank
        if not others.any() or np.isnan(wait_us_NN[others, rank]).any() or np.isnan(wait_us_NN[rank, others]).any():
            continue
        ratio = (wait_us_NN[others, rank].min() + FLOOR_US) / (wait_us_NN[rank, others].max() + FLOOR_US)
        if ratio >= MIN_RATIO_OF_FEW and wait_us_NN[others, rank].min() >= MIN_WAIT_US_OF_FEW:
            yield _Mark(Place("column", rank, None, None), math.log(ratio) / (0.25 * math.sqrt(2)), float(ratio))


def _medians(values_NN: np.ndarray, axis: int) -> np.ndarray:
    """Median along an axis without NaN; 0 where there is nothing else."""
    out = np.zeros(values_NN.shape[1 - axis])
    lines = values_NN.T if axis == 0 else values_NN
    for k, line in enumerate(lines):
        known = line[~np.isnan(line)]
        out[k] = np.median(known) if len(known) else 0.0
    return out


def _median(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else 0.0


@dataclass(frozen=True, eq=False)
class _Effects:
    """One window, in logarithms: column_N and row_N (what each rank adds), point_NN (what is left), sigma (its scale).

    point_NN is NaN on the diagonal and in the rows of ranks without data.
    """

    column_N: np.ndarray
    row_N: np.ndarray
    point_NN: np.ndarray
    sigma: float

    @staticmethod
    def of(wait_us_NN: np.ndarray, node_of_rank_N: np.ndarray) -> "_Effects":
        num_ranks = len(node_of_rank_N)
        off_diagonal = ~np.eye(num_ranks, dtype=bool)
        usual_us = _median(wait_us_NN[off_diagonal])
        floor_us = FLOOR_US + 0.02 * usual_us
        log_NN = np.where(off_diagonal, np.log(wait_us_NN + floor_us), np.nan)
        same_node = node_of_rank_N[:, None] == node_of_rank_N[None, :]
        for tier in (same_node, ~same_node):
            log_NN[tier] -= _median(log_NN[tier])
        column_N, row_N = np.zeros(num_ranks), np.zeros(num_ranks)
        for _ in range(4):  # Tukey's median polish
            column_N += _medians(log_NN - row_N[:, None] - column_N[None, :], axis=0)
            row_N += _medians(log_NN - row_N[:, None] - column_N[None, :], axis=1)
        column_N, row_N = column_N - _median(column_N), row_N - _median(row_N)
        point_NN = log_NN - row_N[:, None] - column_N[None, :]
        point_NN = point_NN - _median(point_NN)
        sigma = max(MIN_SIGMA, 1.4826 * _median(np.abs(point_NN)))
        return _Effects(column_N, row_N, point_NN, sigma)

    @property
    def num_ranks(self) -> int:
        return len(self.column_N)

    def marks(self) -> Iterator[_Mark]:
        # Standard error of a median of N - 1 values, in the normal case.
        error = self.sigma * math.sqrt(math.pi / 2 / (self.num_ranks - 1))
        slow = set()
        for kind, effect_N in (("column", self.column_N), ("row", self.row_N)):
            for rank in np.flatnonzero((effect_N / error >= MIN_SCORE) & (np.exp(effect_N) >= MIN_RATIO)).tolist():
                slow.add((kind, rank))
                yield _Mark(Place(kind, rank, None, None), effect_N[rank] / error, math.exp(effect_N[rank]))
        points = (self.point_NN / self.sigma >= MIN_POINT_SCORE) & (np.exp(self.point_NN) >= MIN_POINT_RATIO)
        for src, dst in np.argwhere(points).tolist():
            if ("row", src) not in slow and ("column", dst) not in slow:
                left = self.point_NN[src, dst]
                yield _Mark(Place("point", None, src, dst), left / self.sigma, math.exp(left))
