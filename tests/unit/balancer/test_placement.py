"""Placement: its invariants, its maps and its file."""

import numpy as np
import pytest
from eprt.balancer import Placement
from eprt.balancer.placement import even_nodes


@pytest.mark.parametrize(
    ("num_experts", "num_gpus", "want"),
    [
        (10, 4, [[0, 1, 2], [3, 4, 5], [6, 7, -1], [8, 9, -1]]),
        (2, 3, [[0], [1], [-1]]),
        (6, 3, [[0, 1], [2, 3], [4, 5]]),
        (5, 1, [[0, 1, 2, 3, 4]]),
    ],
    ids=["padded", "fewer experts than GPUs", "even", "one GPU"],
)
def test_contiguous(num_experts, num_gpus, want):
    placement = Placement.contiguous(2, num_experts, num_gpus)
    assert placement.physical_to_logical_map.reshape(2, num_gpus, -1).tolist() == [want, want]
    assert (placement.replica_count == 1).all() and placement.num_experts == num_experts
    slot_of_expert = placement.logical_to_physical_map[0, :, 0]
    assert placement.physical_to_logical_map[0, slot_of_expert].tolist() == list(range(num_experts))


def test_contiguous_with_spare_slots_leaves_them_empty():
    placement = Placement.contiguous(1, 4, 2, num_slots=8)
    assert placement.physical_to_logical_map.tolist() == [[0, 1, -1, -1, 2, 3, -1, -1]]
    assert placement.gpu_load(np.array([[1.0, 2, 3, 4]])).tolist() == [[3.0, 7.0]]


@pytest.mark.parametrize(
    ("slots", "arguments", "message"),
    [
        ([[0, 1, 1, -3]], {"num_gpus": 2}, r"\[layer 0, slot 3\] = -3"),
        ([[0, 1], [0, 0]], {"num_gpus": 2}, r"\[layer 1\]: expert 1 of 2 has no slot"),
        ([[0, 1, 2]], {"num_gpus": 2}, "num_slots=3 is not a multiple of num_gpus=2; use 2 or 4"),
        ([[0, 1]], {"num_gpus": 2, "num_nodes": 4}, "num_gpus=2 is not a multiple of num_nodes=4"),
        ([[0.0, 1.0]], {"num_gpus": 2}, "dtype float64"),
        ([0, 1], {"num_gpus": 2}, r"shape \(2,\)"),
        ([[0, 1]], {"num_gpus": 0}, "num_gpus=0: must be an integer of at least 1"),
        ([[0, 1]], {"num_gpus": 1, "epoch": -1}, "epoch=-1"),
        ([[0, 1]], {"num_gpus": 1, "epoch": [1]}, r"epoch=\[1\]: must be an integer"),
        ([[0, 1]], {"num_gpus": 1, "metrics": 3}, "metrics=3: must be an object"),
        ([[0, 1]], {"num_gpus": 1, "slot_weight": [[1, {}]]}, "slot_weight must be equally long lists of numbers"),
        ([[-1, -1]], {"num_gpus": 1}, "no expert at all"),
    ],
)
def test_an_invalid_placement_is_refused(slots, arguments, message):
    with pytest.raises(ValueError, match=message):
        Placement(np.array(slots), **arguments)


def test_a_placement_cannot_be_changed():
    source = np.array([[0, 1]])
    placement = Placement(source, num_gpus=2)
    source[0, 0] = 1
    assert placement.physical_to_logical_map.tolist() == [[0, 1]]
    with pytest.raises(ValueError, match="read-only"):
        placement.physical_to_logical_map[0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        placement.replica_count[0, 0] = 5


def test_a_broken_placement_file_is_named(tmp_path):
    path = tmp_path / "placement.json"
    for text, message in (
        ("{", "Expecting"),
        ("{}", "no 'physical_to_logical_map'"),
        ('{"physical_to_logical_map": [[0, 1], [0]], "num_gpus": 1}', r"\[layer 1\] has 1 slots"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"placement.json: .*{message}"):
            Placement.load(path)


def test_the_maps_are_inverse_and_weights_split_the_load():
    weight_LP = np.array([[0.25, 1, 0, 1, 0.75, 0]])
    placement = Placement(np.array([[0, 1, -1, 2, 0, -1]]), 3, slot_weight=weight_LP)
    assert placement.replica_count.tolist() == [[2, 1, 1]]
    assert placement.logical_to_physical_map.tolist() == [[[0, 4], [1, -1], [3, -1]]]
    load_LE = np.array([[8.0, 1, 3]])
    assert placement.gpu_load(load_LE).tolist() == [[3, 3, 6]]
    assert placement.even_weight_LP.tolist() == [[0.5, 1, 0, 1, 0.5, 0]]
    assert placement.gpu_load(load_LE, placement.even_weight_LP).tolist() == [[5, 3, 4]]
    with pytest.raises(ValueError, match=r"load_LE has shape \(1, 2\); this placement has \(1, 3\)"):
        placement.gpu_load(load_LE[:, :2])


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([[0.5, 1, 0.5]], r"slot_weight has shape \(1, 3\); physical_to_logical_map has \(1, 4\)"),
        ([[0.5, 1, 0.4, 0]], r"slot_weight\[layer 0\]: the slots of expert 0 sum to 0.9, not to 1"),
        ([[1.5, 1, -0.5, 0]], r"slot_weight\[layer 0, slot 2\] = -0.5: must be at least 0"),
        ([[0.5, 1, 0.5, 0.1]], r"slot_weight\[layer 0, slot 3\] = 0.1: .*0 where the slot is empty"),
        ([["a", 1, 1, 1]], "slot_weight must be equally long lists of numbers"),
    ],
)
def test_weights_that_do_not_split_each_expert_are_refused(weight, message):
    with pytest.raises(ValueError, match=message):
        Placement(np.array([[0, 1, 0, -1]]), 2, slot_weight=weight)


def test_a_file_keeps_everything(tmp_path):
    weight_LP = np.array([[0.25, 1, 0.75, 0]])
    placement = Placement(np.array([[0, 1, 0, -1]]), 2, 2, epoch=7, metrics={"policy": "x"}, slot_weight=weight_LP)
    placement.save(tmp_path / "p.json")
    again = Placement.load(tmp_path / "p.json")
    assert again.to_json() == placement.to_json() and (again.num_nodes, again.epoch) == (2, 7)
    assert "slot_weight" not in Placement.contiguous(1, 4, 2).to_json()


def test_nodes_of_unequal_size_or_out_of_order_count_as_one():
    assert even_nodes([0, 0, 1, 1, 2, 2]) == 3 and even_nodes([0]) == 1
    assert even_nodes([0, 0, 1]) == even_nodes([0, 1, 0, 1]) == 1
