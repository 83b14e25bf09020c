"""LinkTopology: which links are alike and can be compared: inside nodes, between nodes, racks or halves of a node.

Given in a file, or learned: nodes (or the ranks of a node) form groups where all links between groups are longer than
all links inside them, from the beginning of the run to its end. Judges no link.

Where racks hold unequal numbers of ranks, links of one tier are still not alike: a rank of the smaller rack has more of
its links to the other one, so it gets its data late more often, and waits inside its rack are longer as well.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..windows.medians import median

SCHEMA = "eprt.topology/1"
MIN_STEP = 1.2  # links between groups are at least so many times as long as those inside
# Of so many places a small step is enough: noise alone divides six into groups that fit in one of 300 logs.
MANY_PLACES, MIN_STEP_OF_MANY = 6, 1.1
BETWEEN_ALL = "between all nodes"  # several tiers, where racks are known or learned
_MIN_WINDOWS = 4  # fewer cannot tell a layout from a fault
_IN_NODES = ("node", "half of a node")  # levels that are no racks
_FEWEST_ALIKE = 4  # ranks of a rack: links of fewer are not compared among themselves alone


@dataclass(frozen=True, eq=False)
class LinkTopology:
    """Tiers of N ranks' links."""

    tier_NN: np.ndarray  # index of each link's tier, -1 on the diagonal
    names: tuple[str, ...]  # of the tiers
    alike_NN: np.ndarray  # index of the links that each is compared with: its tier, or a part of it; -1 on the diagonal

    @staticmethod
    def from_nodes(node_of_rank_N: np.ndarray) -> "LinkTopology":
        return _from_levels([("node", np.asarray(node_of_rank_N))])

    @staticmethod
    def from_file(path: str | Path, node_of_rank_N: np.ndarray) -> "LinkTopology":
        """{"schema":"eprt.topology/1","levels":{"rack":[group of each rank], ...}}. ValueError says what is wrong."""
        try:
            data = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        levels = data.get("levels") if isinstance(data, dict) and data.get("schema") == SCHEMA else None
        if not isinstance(levels, dict) or not levels:
            raise ValueError(f'{path} is not {{"schema":"{SCHEMA}","levels":{{"rack":[group of each rank]}}}}')
        return _from_levels([("node", node_of_rank_N), *_checked_levels(path, levels, len(node_of_rank_N))])

    @staticmethod
    def learn(wait_us_WNN: np.ndarray, node_of_rank_N: np.ndarray) -> "LinkTopology":
        """Groups of nodes, and groups of at least two ranks inside nodes. A fault that begins or ends in the run is not
        mistaken for a layout, nor is a single link; a node that is far from all others from the first window on is."""
        levels = [("node", np.asarray(node_of_rank_N))]
        num_nodes = len(set(node_of_rank_N.tolist()))
        if len(wait_us_WNN) >= _MIN_WINDOWS:
            level_us_NN = _calm_level(wait_us_WNN)
            if num_nodes > 2:
                groups = find_groups(_between_nodes(level_us_NN, node_of_rank_N))
                if groups is not None:
                    nodes = np.unique(node_of_rank_N, return_inverse=True)[1]
                    levels.append(("rack", groups[nodes]))
            halves = _find_halves(level_us_NN, node_of_rank_N)
            if halves is not None:
                levels.append(("half of a node", halves))
        return _from_levels(levels)


def _from_levels(levels: list[tuple[str, np.ndarray]]) -> LinkTopology:
    """Links are alike where their ends share the same groups."""
    num_ranks = len(levels[0][1])
    code_NN = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for k, (_, group_N) in enumerate(levels):
        code_NN |= (group_N[:, None] != group_N).astype(np.int64) << k
    off_diagonal = ~np.eye(num_ranks, dtype=bool)
    codes, tier_X = np.unique(code_NN[off_diagonal], return_inverse=True)
    tier_NN = np.full((num_ranks, num_ranks), -1)
    tier_NN[off_diagonal] = tier_X
    names = tuple(_name_of(int(code), [name for name, _ in levels]) for code in codes)
    return LinkTopology(tier_NN, names, _alike(tier_NN, [group_N for name, group_N in levels if name not in _IN_NODES]))


def _alike(tier_NN: np.ndarray, racks: list[np.ndarray]) -> np.ndarray:
    """Tiers, apart by the sizes of the racks at both ends."""
    alike_NN = tier_NN.copy()
    for rack_N in racks:
        _, rack_N, sizes = np.unique(rack_N, return_inverse=True, return_counts=True)
        size_N = sizes[rack_N]
        kinds, kind_N, num_ranks = np.unique(size_N, return_inverse=True, return_counts=True)
        if len(kinds) > 1 and num_ranks.min() >= _FEWEST_ALIKE:
            alike_NN = alike_NN * len(kinds) ** 2 + kind_N[:, None] * len(kinds) + kind_N
    known_NN = tier_NN >= 0
    alike_NN[known_NN] = np.unique(alike_NN[known_NN], return_inverse=True)[1]
    return np.where(known_NN, alike_NN, -1)


def _name_of(code: int, levels: list[str]) -> str:
    crossed = [name for k, name in enumerate(levels) if code >> k & 1 and name != "half of a node"]
    halves = [name for k, name in enumerate(levels) if code >> k & 1 and name == "half of a node"]
    if crossed:
        return f"between {crossed[-1]}s"
    return "between halves of a node" if halves else "inside nodes"


def _checked_levels(path: str | Path, levels: dict[str, Any], num_ranks: int) -> list[tuple[str, np.ndarray]]:
    out = []
    for name, groups in levels.items():
        if not isinstance(groups, list) or len(groups) != num_ranks:
            num = len(groups) if isinstance(groups, list) else "no"
            raise ValueError(f"{path}: level {name!r} has {num} entries; the job has {num_ranks} ranks")
        if not all(isinstance(group, int | str) for group in groups):
            raise ValueError(f"{path}: level {name!r} must hold a number or a name for each rank")
        out.append((str(name), np.unique([str(group) for group in groups], return_inverse=True)[1]))
    return out


def _calm_level(wait_us_WNN: np.ndarray) -> np.ndarray:
    """Of each link in the calmer of the run's first and last third."""
    third = max(2, len(wait_us_WNN) // 3)
    first_NN, last_NN = median(wait_us_WNN[:third], 0), median(wait_us_WNN[-third:], 0)
    return np.fmin(first_NN, last_NN)


def _between_nodes(level_us_NN: np.ndarray, node_of_rank_N: np.ndarray) -> np.ndarray:
    """[K][K], both ways together; NaN on the diagonal."""
    nodes = np.unique(node_of_rank_N)
    out_KK = np.full((len(nodes), len(nodes)), np.nan)
    for a, first in enumerate(nodes):
        for b, second in enumerate(nodes[:a]):
            i, j = node_of_rank_N == first, node_of_rank_N == second
            both_X = np.concatenate([level_us_NN[np.ix_(i, j)].ravel(), level_us_NN[np.ix_(j, i)].ravel()])
            out_KK[a, b] = out_KK[b, a] = float(median(both_X, 0))
    return out_KK


def _find_halves(level_us_NN: np.ndarray, node_of_rank_N: np.ndarray) -> np.ndarray | None:
    """Groups inside all nodes of the same size, by the ranks' positions in them."""
    nodes, counts = np.unique(node_of_rank_N, return_counts=True)
    size = int(counts[0])
    if size < 4 or (counts != size).any():
        return None
    local = [np.flatnonzero(node_of_rank_N == node) for node in nodes]
    level_KK = median(np.stack([level_us_NN[np.ix_(ranks, ranks)] for ranks in local]), 0)
    level_KK = (level_KK + level_KK.T) / 2
    np.fill_diagonal(level_KK, np.nan)
    groups = find_groups(level_KK)
    if groups is None or np.bincount(groups).min() < 2:
        return None
    out_N = np.zeros(len(node_of_rank_N), dtype=np.int64)
    for ranks in local:
        out_N[ranks] = groups
    return out_N


def find_groups(level_KK: np.ndarray) -> np.ndarray | None:
    """Group of each of K >= 3 places if all links between groups are longer than all links inside, by a clear step."""
    num = len(level_KK)
    i, j = np.triu_indices(num, 1)
    known_X = level_KK[i, j]
    if num < 3 or np.isnan(known_X).any() or known_X.min() <= 0:
        return None
    ordered_X = np.sort(known_X)
    steps_X = ordered_X[1:] / ordered_X[:-1]
    at = int(steps_X.argmax())
    if steps_X[at] < (MIN_STEP if num < MANY_PLACES else MIN_STEP_OF_MANY):
        return None
    is_near_KK = level_KK <= ordered_X[at]
    np.fill_diagonal(is_near_KK, True)
    group_K = is_near_KK.argmax(axis=1)  # the first place that each is near to
    if not (is_near_KK == (group_K[:, None] == group_K)).all():
        return None
    groups = np.unique(group_K, return_inverse=True)[1]
    return groups if groups.max() > 0 else None
