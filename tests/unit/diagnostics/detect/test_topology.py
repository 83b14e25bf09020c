"""Tiers of links: given by nodes, by a file, or learned; a fault is not learned as a layout."""

import json

import numpy as np
import pytest
from eprt.diagnostics.detect.topology import LinkTopology, find_groups

FOUR_NODES = np.repeat(np.arange(4), 4)


def waits_of(node_N: np.ndarray, far: set[tuple[int, int]], num_windows: int = 12, seed: int = 0) -> np.ndarray:
    """30 us inside nodes, 80 between them, 160 between the pairs of nodes in far; 10 % noise."""
    node_NN = np.stack(np.broadcast_arrays(node_N[:, None], node_N))
    usual_NN = np.where(node_NN[0] == node_NN[1], 30.0, 80.0)
    for a, b in far:
        usual_NN[((node_NN[0] == a) & (node_NN[1] == b)) | ((node_NN[0] == b) & (node_NN[1] == a))] = 160
    noise_WNN = np.random.default_rng(seed).standard_normal((num_windows, *usual_NN.shape))
    return usual_NN * np.exp(0.1 * noise_WNN)


def test_nodes_make_two_tiers():
    tiers = LinkTopology.from_nodes(np.array([0, 0, 1, 1]))
    assert tiers.tier_NN.tolist() == [[-1, 0, 1, 1], [0, -1, 1, 1], [1, 1, -1, 0], [1, 1, 0, -1]]
    assert tiers.names == ("inside nodes", "between nodes")
    assert LinkTopology.from_nodes(np.zeros(3, dtype=int)).names == ("inside nodes",)


@pytest.mark.parametrize(
    ("node_N", "far", "racks"),
    [
        (FOUR_NODES, {(a, 3) for a in range(3)}, [0, 0, 0, 1]),
        (np.repeat(np.arange(8), 2), {(a, b) for a in range(6) for b in (6, 7)}, [0] * 6 + [1] * 2),
    ],
)
def test_racks_are_learned(node_N, far, racks):
    tiers = LinkTopology.learn(waits_of(node_N, far), node_N)
    assert tiers.names == ("inside nodes", "between nodes", "between racks")
    rack_N = np.array(racks)[node_N]
    assert (tiers.tier_NN[rack_N[:, None] != rack_N] == 2).all()


def test_halves_of_nodes_are_learned():
    half_N = np.tile([0, 0, 1, 1], 4)
    waits_WNN = waits_of(FOUR_NODES, set())
    waits_WNN[:, (FOUR_NODES[:, None] == FOUR_NODES) & (half_N[:, None] != half_N)] *= 1.6
    assert "between halves of a node" in LinkTopology.learn(waits_WNN, FOUR_NODES).names


def test_a_slow_path_is_no_layout_and_neither_is_a_node_that_becomes_slow():
    assert len(LinkTopology.learn(waits_of(FOUR_NODES, {(1, 2)}), FOUR_NODES).names) == 2
    becomes_WNN = np.concatenate([waits_of(FOUR_NODES, set(), 5), waits_of(FOUR_NODES, {(a, 3) for a in range(3)}, 5)])
    assert len(LinkTopology.learn(becomes_WNN, FOUR_NODES).names) == 2
    alone_WNN = waits_of(FOUR_NODES[:4], set())
    alone_WNN[:, :, 2] *= 3
    alone_WNN[:, 2] *= 3
    assert len(LinkTopology.learn(alone_WNN, FOUR_NODES[:4]).names) == 1, "one rank is no half of a node"


def test_groups_need_a_clear_step():
    assert find_groups(np.array([[np.nan, 1, 2], [1, np.nan, 2], [2, 2, np.nan]])).tolist() == [0, 0, 1]
    assert find_groups(np.array([[np.nan, 1, 1.1], [1, np.nan, 1.1], [1.1, 1.1, np.nan]])) is None
    assert find_groups(np.full((2, 2), 1.0)) is None


def test_of_many_nodes_a_smaller_step_is_clear():
    level_KK = np.full((8, 8), 1.15)
    level_KK[:6, :6] = level_KK[6:, 6:] = 1.0
    np.fill_diagonal(level_KK, np.nan)
    assert find_groups(level_KK).tolist() == [0] * 6 + [1] * 2
    assert find_groups(level_KK[4:, 4:]) is None, "of four nodes, noise alone divides one log in five"


def test_unequal_racks_are_compared_apart():
    node_N = np.repeat(np.arange(8), 2)
    unequal = LinkTopology.learn(waits_of(node_N, {(a, b) for a in range(6) for b in (6, 7)}), node_N)
    small_N = node_N >= 6
    ends_NN = small_N[:, None] * 2 + small_N
    for tier in range(3):
        apart = [set(unequal.alike_NN[(unequal.tier_NN == tier) & (ends_NN == ends)].tolist()) for ends in range(4)]
        assert all(len(alike) <= 1 for alike in apart) and len(set.union(*apart)) == sum(map(len, apart))
    assert (np.diag(unequal.alike_NN) == -1).all()
    equal = LinkTopology.learn(waits_of(node_N, {(a, b) for a in range(4) for b in range(4, 8)}), node_N)
    assert equal.names[-1] == "between racks" and (equal.alike_NN == equal.tier_NN).all()
    few_N = np.arange(8)
    few = LinkTopology.learn(waits_of(few_N, {(a, 7) for a in range(7)}), few_N)
    assert few.names[-1] == "between racks" and (few.alike_NN == few.tier_NN).all(), "one rank cannot be compared alone"


def test_a_file_gives_levels(tmp_path):
    path = tmp_path / "topology.json"
    path.write_text(json.dumps({"schema": "eprt.topology/1", "levels": {"rack": ["a", "a", "b", "b"]}}))
    tiers = LinkTopology.from_file(path, np.array([0, 1, 2, 3]))
    assert tiers.names == ("between nodes", "between racks") and tiers.tier_NN[0].tolist() == [-1, 0, 1, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not {"),
        ('{"schema":"eprt.topology/1","levels":{"rack":[0,0,1]}}', "level 'rack' has 3 entries; the job has 4 ranks"),
        ('{"schema":"eprt.topology/1","levels":{"rack":[0,0,1,null]}}', "must hold a number or a name"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, text, message):
    path = tmp_path / "topology.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message.replace("{", r"\{")):
        LinkTopology.from_file(path, np.zeros(4, dtype=int))
