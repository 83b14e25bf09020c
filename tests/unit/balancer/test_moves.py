"""Moves between placements, counted, and saved by renaming GPUs."""

from itertools import permutations

import numpy as np
import pytest
from eprt.balancer import Placement, aligned, moved_slots, plan

OPTIONS = {"num_slots": 24, "num_gpus": 6, "num_nodes": 2}


def test_only_what_a_gpu_did_not_hold_counts():
    before = Placement(np.array([[0, 1, 2, 3]]), 2)
    assert not moved_slots(before, Placement(np.array([[1, 0, 3, 2]]), 2)).any(), "renamed inside a GPU"
    assert moved_slots(before, Placement(np.array([[2, 1, 0, 3]]), 2)).tolist() == [[True, False, True, False]]
    wider = Placement(np.array([[0, 1, -1, 2, 3, -1]]), 2)
    assert moved_slots(wider, Placement(np.array([[0, -1, 3, 2, 1, -1]]), 2)).sum() == 2, "no slot is filled by nothing"


def test_placements_of_different_clusters_are_refused():
    before = Placement(np.array([[0, 1, 2, 3]]), 2)
    for other, name in (
        (Placement(np.array([[0, 1, 2, 3]] * 2), 2), "num_layers: 1 before and 2 after"),
        (Placement(np.array([[0, 1, 2, 3]]), 4), "num_gpus: 2 before and 4 after"),
        (Placement(np.array([[0, 1, 2, 2]]), 2), "num_experts: 4 before and 3 after"),
    ):
        with pytest.raises(ValueError, match=f"{name}; the placements belong to different models or clusters"):
            moved_slots(before, other)


@pytest.mark.parametrize("seed", range(4))
def test_aligned_plans_are_the_same_plan_with_the_fewest_moves(seed):
    """Against all ways to rename the GPUs of each node."""
    rng = np.random.default_rng(seed)
    current, wanted = (plan(rng.lognormal(size=(2, 16)), **OPTIONS) for _ in range(2))
    found = aligned(wanted, current)
    load_LE = rng.lognormal(size=(2, 16))
    for layer in range(2):
        rows_GS = wanted.physical_to_logical_map[layer].reshape(6, 4)
        for first in (0, 3):
            slots = slice(4 * first, 4 * first + 12)
            least = min(
                sum(
                    len(
                        set(rows_GS[first + new])
                        - set(current.physical_to_logical_map[layer].reshape(6, 4)[first + old])
                    )
                    for old, new in enumerate(order)
                )
                for order in permutations(range(3))
            )
            assert moved_slots(current, found)[layer, slots].sum() == least
        kept = [sorted(row) for row in found.physical_to_logical_map[layer].reshape(6, 4).tolist()]
        assert sorted(kept) == sorted(sorted(row) for row in rows_GS.tolist())
    np.testing.assert_allclose(np.sort(found.gpu_load(load_LE)), np.sort(wanted.gpu_load(load_LE)))
    same = found.physical_to_logical_map == current.physical_to_logical_map
    assert same.sum() >= found.physical_to_logical_map.size - moved_slots(current, found).sum() - 1e-9, "slots are kept"


def test_what_is_aligned_already_does_not_move():
    current = plan(np.random.default_rng(0).lognormal(size=(2, 16)), **OPTIONS)
    np.testing.assert_array_equal(aligned(current, current).physical_to_logical_map, current.physical_to_logical_map)
