"""Wide changes: the whole job, a tier of links, a node, a path between two nodes is slower than in its own past.

Nobody stands out among peers when all of them are slow, so only the run's own past, or a saved baseline, tells. Works
on the links from one node to another together. Knows no single rank or link, except to name those that take part.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..windows.baseline import Baseline
from ..windows.matrices import WindowMatrices
from ..windows.medians import median
from .chance import Chance
from .effects import FLOOR_US, START
from .past import MIN_PAST, Limits, find_changes
from .runs import WindowRun
from .sightings import Place, Sighting
from .topology import BETWEEN_ALL, LinkTopology

LIMITS = Limits(min_ratio=1.5, short_ratio=0.6, min_windows=2, min_peer_ratio=0.0)
MOST_OF = 0.8  # of the pairs of nodes: enough to call it the job, the tier or the node
LOW = 0.3  # quantile of the links from one node to another
ECHO_PART = 0.6  # of the largest excess: less is an echo
EVEN = 0.55  # of the larger excesses is the least of a tier's or a job's
MOST_NODES = 64  # more are not looked at pair by pair
MORE_TOKENS, TOKENS_EXPLAIN = 1.3, 0.5  # tokens that explain so much of a change's logarithm make it load
SLOWER_TOO = 1.25  # of a slower job's computing
SLOWER_COMPUTE, FEW_SLOWER = 1.5, 0.5  # of so many ranks is the job's


@dataclass(frozen=True, eq=False)
class _Series:
    """The windows of the baseline, if any, and of the run."""

    wait_us_WNN: np.ndarray
    compute_us_WN: np.ndarray
    tokens_WN: np.ndarray
    num_before: int

    @staticmethod
    def of(matrices: WindowMatrices, baseline: Baseline | None) -> "_Series":
        own = _Series(matrices.wait_us_WNN, matrices.compute_us_WN, matrices.recv_tokens_WNN.sum(axis=2), 0)
        if baseline is None:
            return own
        return _Series(
            np.concatenate([baseline.wait_us_WNN, own.wait_us_WNN]),
            np.concatenate([baseline.compute_us_WN, own.compute_us_WN]),
            np.concatenate([baseline.recv_tokens_WN, own.tokens_WN]),
            len(baseline.compute_us_WN),
        )


def find_wide(
    matrices: WindowMatrices, topology: LinkTopology, baseline: Baseline | None = None, links: Chance | None = None
) -> list[Sighting]:
    """At most one for the same windows: the widest. links: their noise, which stays, and so do averages of few links:
    a path alone must be more than that."""
    series, node_N = _Series.of(matrices, baseline), matrices.node_of_rank_N
    nodes = np.unique(node_N)
    if matrices.num_ranks < 2 or len(nodes) > MOST_NODES:
        return []
    pairs, log_WP = _pair_logs(series.wait_us_WNN, topology.tier_NN, node_N)
    changes = [
        find_changes(log_WP, log_WP, noise, LIMITS, series.num_before) for noise in (Chance(), links or Chance())
    ]
    changed, sure = ({pairs[run.place]: _path(pairs[run.place], run, ratio) for run, ratio in each} for each in changes)
    explained = _explain(changed, set(sure), pairs, node_N, topology, partial(_compute_ratio, series))
    found = [*_slower_job(series), *explained]
    return [
        replace(s, first=s.first - series.num_before, last=s.last - series.num_before)
        for k, s in enumerate(found)
        if not _is_load(series, s) and not any(s.overlaps(wider) for wider in found[:k] if wider.place.kind == "job")
    ]


def _path(pair: tuple[int, int], run: WindowRun, ratio: float) -> Sighting:
    return Sighting(Place("path", None, None, None, nodes=pair), run.first, run.last, run.score, ratio, True)


def _pair_logs(
    wait_us_WNN: np.ndarray, tier_NN: np.ndarray, node_N: np.ndarray
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """(waiting node, awaited node) and a low quantile of the logarithms of their links' waits: absolute, not over the
    peers'. One slow rank or link does not move it."""
    start_NN = np.ones(tier_NN.shape)
    for k in range(int(tier_NN.max(initial=-1)) + 1):
        usual = median(median(wait_us_WNN[:, tier_NN == k], 1), 0)
        start_NN[tier_NN == k] = FLOOR_US + START * np.nan_to_num(usual)
    log_WNN = np.log(wait_us_WNN + start_NN)
    log_WNN[:, tier_NN < 0] = np.nan
    ranks_of = {node: np.flatnonzero(node_N == node) for node in np.unique(node_N).tolist()}
    pairs, columns = [], []
    for first, waiting in ranks_of.items():
        rows_WXN = log_WNN[:, waiting]
        for second, awaited in ranks_of.items():
            if first != second or len(awaited) > 1:
                pairs.append((first, second))
                columns.append(_low(rows_WXN[:, :, awaited].reshape(len(log_WNN), -1)))
    return pairs, np.stack(columns, axis=1)


def _low(values_WX: np.ndarray) -> np.ndarray:
    """A low quantile of what is known."""
    at_W1 = (LOW * np.maximum(0, (~np.isnan(values_WX)).sum(axis=1, keepdims=True) - 1)).astype(int)
    return np.take_along_axis(np.sort(values_WX, axis=1), at_W1, 1)[:, 0]


def _explain(
    changed: dict[tuple[int, int], Sighting],
    sure: set[tuple[int, int]],
    pairs: list[tuple[int, int]],
    node_N: np.ndarray,
    topology: LinkTopology,
    compute_ratio: Callable[[list[Sighting]], float],
) -> Iterator[Sighting]:
    """The widest thing that explains the pairs of nodes: the job, one tier, or nodes for which all others wait. What is
    late for one reason is late for all, so smaller changes beside a larger one are its echoes: with several tiers, and
    ranks that compute as usual, the slowest tier is what is slow, not the job."""
    if not changed:
        return
    tier_of = {pair: _tier_of(pair, node_N, topology) for pair in pairs}
    ratios = {pair: changed[pair].ratio if pair in changed else 1.0 for pair in pairs}
    of_tier = {tier: np.array([ratios[pair] for pair in pairs if tier_of[pair] == tier]) for tier in tier_of.values()}
    slowest = max(of_tier, key=lambda tier: float(np.median(of_tier[tier])))
    if _is_even(of_tier[slowest]):
        is_everywhere = _is_even(np.array(list(ratios.values())))
        if is_everywhere and (len(of_tier) == 1 or compute_ratio(list(changed.values())) >= SLOWER_TOO):
            yield _together("job", list(changed.values()))
            return
        others = [ratio for pair, ratio in ratios.items() if tier_of[pair] != slowest]
        is_slowest = is_everywhere or max(others, default=1.0) < np.median(of_tier[slowest])
        if slowest is not None and len(of_tier[slowest]) > 2 and is_slowest:
            seen = [sighting for pair, sighting in changed.items() if tier_of[pair] == slowest]
            yield _together("tier", seen, tier=topology.names[slowest])
            return
    if _is_between_all(ratios, tier_of):
        seen = [sighting for (first, second), sighting in changed.items() if first != second]
        yield _together("tier", seen, tier=BETWEEN_ALL)
        return
    nodes = {node: _awaited(node, changed, pairs) for node in sorted({awaited for _, awaited in changed})}
    nodes = {node: sighting for node, sighting in nodes.items() if sighting is not None}
    if nodes:
        most = max(sighting.ratio - 1 for sighting in nodes.values())
        yield from (sighting for sighting in nodes.values() if sighting.ratio - 1 >= ECHO_PART * most)
        return
    between = {pair: sighting for pair, sighting in changed.items() if pair[0] != pair[1] and pair in sure}
    for pair in sorted(between):
        if pair[0] < pair[1] or (pair[1], pair[0]) not in between:
            both = [between[each] for each in (pair, (pair[1], pair[0])) if each in between]
            yield _together("path", both, nodes=tuple(sorted(pair)))


def _is_even(ratio_X: np.ndarray) -> bool:
    """Whether nearly all pairs of nodes are slower, by similar ratios."""
    low, high = np.quantile(ratio_X, (1 - MOST_OF, MOST_OF), method="lower")
    return low > 1 and low - 1 >= EVEN * (high - 1)


def _is_between_all(ratios: dict[tuple[int, int], float], tier_of: dict[tuple[int, int], int | None]) -> bool:
    """Whether all links between nodes are slower, by similar ratios, and more so than those inside: of several tiers
    then none is the slowest."""
    between_X, inside_X = (
        np.array([ratio for pair, ratio in ratios.items() if (pair[0] == pair[1]) == is_inside])
        for is_inside in (False, True)
    )
    num_tiers = len({tier for pair, tier in tier_of.items() if pair[0] != pair[1]})
    return num_tiers > 1 and _is_even(between_X) and inside_X.max(initial=1.0) < np.median(between_X)


def _awaited(node: int, changed: dict[tuple[int, int], Sighting], pairs: list[tuple[int, int]]) -> Sighting | None:
    """The node, if all others wait for it longer than before."""
    others = [pair for pair in pairs if pair[1] == node and pair[0] != node]
    seen = [changed[pair] for pair in others if pair in changed]
    return _together("node", seen, nodes=(node,)) if others and len(seen) >= MOST_OF * len(others) else None


def _tier_of(pair: tuple[int, int], node_N: np.ndarray, topology: LinkTopology) -> int | None:
    tiers = topology.tier_NN[np.ix_(node_N == pair[0], node_N == pair[1])]
    known = np.unique(tiers[tiers >= 0])
    return int(known[0]) if len(known) == 1 else None


def _together(kind: str, seen: list[Sighting], nodes: tuple[int, ...] = (), tier: str | None = None) -> Sighting:
    members = tuple(s.place for s in seen) if kind in ("tier", "node") else ()
    return Sighting(
        Place(kind, None, None, None, nodes=nodes, tier=tier),
        int(np.median([s.first for s in seen])),
        int(np.median([s.last for s in seen])),
        max(s.score for s in seen),
        float(np.median([s.ratio for s in seen])),
        True,
        members,
    )


def _slower_job(series: _Series) -> Iterator[Sighting]:
    """More than half of the ranks compute longer than before: they are slow together, the others only seem early."""
    usual_W = median(np.log(np.maximum(series.compute_us_WN, FLOOR_US)), 1)[:, None]
    for run, ratio in find_changes(usual_W, usual_W, Chance(), LIMITS, series.num_before):
        inside = np.arange(run.first, run.last + 1)
        before_N = median(series.compute_us_WN[: run.first], 0)
        slower_N = median(series.compute_us_WN[inside], 0) / np.maximum(before_N, FLOOR_US)
        ranks = np.flatnonzero(slower_N >= SLOWER_COMPUTE).tolist()
        if len(ranks) > FEW_SLOWER * len(slower_N):
            members = tuple(Place("column", rank, None, None) for rank in ranks)
            place = Place("job", None, None, None)
            yield Sighting(place, run.first, run.last, run.score, ratio, True, members)


def _is_load(series: _Series, sighting: Sighting) -> bool:
    """Whether more tokens a call explain it. sighting: with the baseline's windows counted."""
    per_call_W = median(series.tokens_WN, 1)
    inside, outside = per_call_W[sighting.first : sighting.last + 1], per_call_W[: sighting.first]
    if len(outside) < MIN_PAST or not np.nanmedian(outside) > 0:
        return False
    more = float(np.nanmedian(inside) / np.nanmedian(outside))
    return more >= MORE_TOKENS and np.log(more) >= TOKENS_EXPLAIN * np.log(max(1.01, sighting.ratio))


def _compute_ratio(series: _Series, sightings: list[Sighting]) -> float:
    """Time in the experts in the windows of most of these, over what it was before."""
    first, last = (int(np.median([getattr(s, name) for s in sightings])) for name in ("first", "last"))
    before, inside = series.compute_us_WN[:first], series.compute_us_WN[first : last + 1]
    if not before.size or np.isnan(before).all() or np.isnan(inside).all():
        return 1.0
    return float(np.nanmedian(inside) / max(FLOOR_US, float(np.nanmedian(before))))


def compute_change(matrices: WindowMatrices, baseline: Baseline | None, sighting: Sighting, ranks: list[int]) -> float:
    """Median time in the experts of these ranks in the sighting's windows, over what it was before."""
    series = _Series.of(matrices, baseline)
    later = replace(sighting, first=sighting.first + series.num_before, last=sighting.last + series.num_before)
    return _compute_ratio(replace(series, compute_us_WN=series.compute_us_WN[:, ranks]), [later])
