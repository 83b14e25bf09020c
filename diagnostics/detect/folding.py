"""Folding: many sightings that one thing explains become one, with its members: ranks a node, links a path.

Knows places and windows; makes no sightings from waits.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace

import numpy as np

from .sightings import Place, Sighting

NODE_SHARE = 0.6  # of a node's ranks
RANGE = ("point", "row", "column", "node", "path", "tier", "job")  # the widest last
PATH_SHARE = 0.25  # of the links between two nodes, both ways
SMALL = 0.25  # of the largest excess: a column of so little is an echo
SOURCE = 1.5  # a rank's ratio over that of what is wider, which is then its echo
LEFT = 0.8  # of a wider sighting's ratio, without the links of a rank: less shows that it was the rank's
LONGER_BETWEEN = 1.15  # two nodes wait for each other, over how long the others wait for them
LONGER_ALONE = 1.3  # the same where only one of the two is a sighting


def fold(sightings: list[Sighting], node_of_rank_N: np.ndarray) -> list[Sighting]:
    """Only where there are several nodes. A path that a slow node explains is part of the node."""
    size_of = dict(zip(*(values.tolist() for values in np.unique(node_of_rank_N, return_counts=True))))
    if len(size_of) < 2 or not sightings:
        return sightings

    def node_of(place: Place) -> int | None:
        return int(node_of_rank_N[place.rank]) if place.kind == "column" and place.rank is not None else None

    def path_of(place: Place) -> tuple[int, int] | None:
        if place.kind != "point" or place.src is None or place.dst is None:
            return None
        a, b = sorted((int(node_of_rank_N[place.src]), int(node_of_rank_N[place.dst])))
        return (a, b) if a != b else None

    nodes = _fold(sightings, node_of, lambda node: max(2, NODE_SHARE * size_of[node]), "node")
    least_links = lambda path: max(2, PATH_SHARE * size_of[path[0]] * size_of[path[1]])  # noqa: E731
    return _fold(nodes, path_of, least_links, "path")


def _fold(
    sightings: list[Sighting],
    group_of: Callable[[Place], Hashable | None],
    least: Callable[..., float],
    kind: str,
) -> list[Sighting]:
    groups: defaultdict[Hashable, list[Sighting]] = defaultdict(list)
    for sighting in sightings:
        if (group := group_of(sighting.place)) is not None:
            groups[group].append(sighting)
    out, folded = [], set()
    for group, members in groups.items():
        together = _longest_together(members)
        if len({member.place for member in together}) >= least(group):
            folded |= {id(member) for member in together}
            out.append(_one_of(kind, group if isinstance(group, tuple) else (group,), together))
    return [s for s in sightings if id(s) not in folded] + out


def _longest_together(members: list[Sighting]) -> list[Sighting]:
    """Those that overlap with the surest of them."""
    surest = max(members, key=lambda member: member.score)
    return [member for member in members if member.overlaps(surest)]


def _one_of(kind: str, nodes: tuple, members: list[Sighting]) -> Sighting:
    return Sighting(
        Place(kind, None, None, None, nodes=tuple(int(node) for node in nodes)),
        int(np.median([m.first for m in members])),
        int(np.median([m.last for m in members])),
        max(m.score for m in members),
        float(np.median([m.ratio for m in members])),
        sum(m.is_change for m in members) * 2 > len(members),
        tuple(sorted({m.place for m in members}, key=lambda place: (place.rank or 0, place.src or 0, place.dst or 0))),
    )


def join_nodes(
    sightings: list[Sighting],
    all_nodes: list[int],
    path_us: Callable[[Sighting, tuple[int, int]], tuple[float, float]],
    is_slower: Callable[[Sighting], bool],
) -> list[Sighting]:
    """Two nodes for which all others wait are one slow path where they wait for each other longest: who gets data late
    over the path is late for all, but computes no longer (is_slower). path_us: (waits between two nodes, the shorter
    way; waits of the others for the two) in a sighting's windows, the latter 0 where there are no others."""
    nodes = [s for s in sightings if s.place.kind == "node" and not is_slower(s)]
    for first in nodes:
        waits = {pair: path_us(first, pair) for pair in _pairs_with(first.place.nodes[0], all_nodes)}
        if not waits:
            continue
        pair = max(waits, key=lambda each: waits[each][0])
        between_us, others_us = waits[pair]
        partners = [s for s in nodes if s is not first and s.place.nodes[0] in pair and s.overlaps(first)]
        if (between_us >= LONGER_BETWEEN * others_us) if partners else (0 < LONGER_ALONE * others_us <= between_us):
            joined = replace(
                first,
                place=Place("path", None, None, None, nodes=pair),
                score=max(s.score for s in (first, *partners)),
                ratio=max(s.ratio for s in (first, *partners)) * (between_us / others_us if others_us > 0 else 1.0),
                members=(),
            )
            return [s for s in sightings if s is not first and s not in partners] + [joined]
    return sightings


def without_paths_of(sightings: list[Sighting], is_slower: Callable[[Sighting], bool]) -> list[Sighting]:
    """Drops paths that end at a node whose ranks compute longer than before: no path does that."""
    nodes = [s for s in sightings if s.place.kind == "node" and is_slower(s)]

    def is_part(s: Sighting) -> bool:
        return s.place.kind == "path" and any(
            s.overlaps(node) and node.place.nodes[0] in s.place.nodes for node in nodes
        )

    return [s for s in sightings if not is_part(s)]


def _pairs_with(node: int, nodes: list[int]) -> list[tuple[int, int]]:
    return [(min(node, other), max(node, other)) for other in nodes if other != node]


def without_small_echoes(sightings: list[Sighting]) -> list[Sighting]:
    """Drops columns that are small beside another rank's in the same windows: it unsettles all."""
    columns = [s for s in sightings if s.place.kind == "column"]

    def is_echo(s: Sighting) -> bool:
        return s.place.kind == "column" and any(
            s.overlaps(other) and s.ratio - 1 < SMALL * (other.ratio - 1) for other in columns if other is not s
        )

    return [s for s in sightings if not is_echo(s)]


def without_wide_echoes(
    sightings: list[Sighting],
    is_slower: Callable[[Sighting], bool],
    ratio_without: Callable[[Sighting, int], float],
) -> list[Sighting]:
    """Drops what is wider than a rank or a link but is its echo: one very late rank unsettles all, and of few ranks one
    has half of the links. is_slower: whether the ranks of a wide sighting compute longer than before, which no echo
    does. ratio_without: of a wide sighting to the past, without a rank's links."""
    ranks = [s for s in sightings if s.place.rank is not None]

    def is_echo_of(wide: Sighting, s: Sighting) -> bool:
        if not s.overlaps(wide) or s.place in wide.members:
            return False
        assert s.place.rank is not None
        is_of_it = s.ratio > wide.ratio and ratio_without(wide, s.place.rank) < LEFT * wide.ratio
        return s.ratio >= SOURCE * wide.ratio or is_of_it

    def is_echo(wide: Sighting) -> bool:
        is_wide_change = wide.is_change and wide.place.kind in RANGE[3:]
        return is_wide_change and any(is_echo_of(wide, s) for s in ranks) and not is_slower(wide)

    return [s for s in sightings if not is_echo(s)]


def without_explained(
    sightings: Iterable[Sighting], wide: list[Sighting], node_of_rank_N: np.ndarray
) -> list[Sighting]:
    """Drops what a wider finding of the same windows explains."""
    return [
        s for s in sightings if not any(s.overlaps(w) and _explains(w, s, node_of_rank_N) for w in wide if w is not s)
    ]


def _explains(wide: Sighting, s: Sighting, node_of_rank_N: np.ndarray) -> bool:
    """What is late for one reason is late for all, by less. A narrower place that is slower still is a finding of its
    own, except where it is part of the wider one."""
    if RANGE.index(s.place.kind) >= RANGE.index(wide.place.kind):
        return False
    ranks = [rank for rank in (s.place.rank, s.place.src, s.place.dst) if rank is not None]
    nodes = {int(node_of_rank_N[rank]) for rank in ranks} | set(s.place.nodes)
    if wide.place.kind == "job" and not s.is_change and s.ratio >= SOURCE * wide.ratio:
        return False  # a rank that is late to its peers by far more than the job is slower
    is_part = s.place in wide.members or bool(nodes & set(wide.place.nodes))
    return is_part or s.place.kind == "row" or s.ratio < wide.ratio or (wide.place.kind == "job" and s.is_change)
