"""Placement's invariants, plan()'s promises and the file formats, on drawn and on made-up loads."""

import json

import numpy as np
import pytest
from eprt.balancer import Placement, check_load, plan, read_load, rebalance_experts
from eprt.balancer.__main__ import main
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.balancer.cases import shapes


@st.composite
def plans(draw):
    """(load_LE, keyword arguments of plan)."""
    num_experts, arguments = draw(shapes())
    kind = draw(st.sampled_from(["any", "zero", "equal", "one hot", "huge"]))
    num_layers = draw(st.integers(1, 3))
    load = np.zeros((num_layers, num_experts))
    if kind == "any":
        values = st.lists(st.integers(0, 1000), min_size=load.size, max_size=load.size)
        load = np.array(draw(values), dtype=np.float64).reshape(load.shape)
    elif kind == "equal":
        load += 7
    elif kind == "one hot":
        load[:, draw(st.integers(0, num_experts - 1))] = 1e6
    elif kind == "huge":
        load += 1e300 * np.arange(num_experts)
    return load, arguments


def copies_per_gpu(placement: Placement) -> np.ndarray:
    """[L, G, E]: how many copies of each expert each GPU holds."""
    slots_LGS = placement.physical_to_logical_map.reshape(placement.num_layers, placement.num_gpus, -1)
    return (slots_LGS[..., None] == np.arange(placement.num_experts)).sum(2)


@settings(max_examples=40, deadline=None)
@given(plans())
def test_plan_is_deterministic_and_survives_a_file(case):
    load_LE, arguments = case
    first, second = plan(load_LE, **arguments), plan(load_LE, **arguments)
    np.testing.assert_array_equal(first.physical_to_logical_map, second.physical_to_logical_map)
    again = Placement.from_json(json.loads(json.dumps(first.to_json())))
    np.testing.assert_array_equal(first.physical_to_logical_map, again.physical_to_logical_map)
    assert (again.num_gpus, again.num_nodes, again.epoch, again.metrics) == (
        first.num_gpus,
        first.num_nodes,
        first.epoch,
        first.metrics,
    )


@settings(max_examples=40, deadline=None)
@given(plans())
def test_hierarchical_plans_keep_groups_inside_a_node(case):
    load_LE, arguments = case
    placement = plan(load_LE, **arguments)
    if placement.metrics["policy"] != "hierarchical":
        return
    node_of_slot = np.arange(placement.num_slots) // (placement.num_slots // placement.num_nodes)
    group_of_expert = np.arange(placement.num_experts) // (placement.num_experts // arguments["num_groups"])
    for slots_P in placement.physical_to_logical_map:
        for group in range(arguments["num_groups"]):
            assert len(set(node_of_slot[group_of_expert[slots_P] == group])) == 1


@pytest.mark.parametrize("load", [0.0, 5.0], ids=["zero", "equal"])
def test_equal_loads_stay_in_order(load):
    placement = plan(np.full((2, 8), load), num_gpus=4, num_nodes=2, num_groups=4)
    assert placement.physical_to_logical_map.tolist() == [list(range(8))] * 2


def test_equal_loads_with_spare_slots_keep_the_contiguous_copy_in_place():
    placement = plan(np.ones((1, 8)), num_slots=12, num_gpus=4)
    slots_GS = placement.physical_to_logical_map.reshape(4, 3)
    assert slots_GS[:, :2].reshape(-1).tolist() == list(range(8))
    assert (copies_per_gpu(placement) <= 1).all()


def test_the_hot_expert_gets_the_copies_and_the_load_evens_out():
    load_LE = np.ones((1, 8))
    load_LE[0, 3] = 100
    before = Placement.contiguous(1, 8, 4).gpu_load(load_LE)
    placement = plan(load_LE, num_slots=12, num_gpus=4)
    assert placement.replica_count[0].tolist() == [2, 1, 1, 4, 1, 1, 1, 1]
    assert before.max() / before.mean() > 3.7
    assert placement.metrics["max_over_mean"] < 1.02


def test_balance_is_near_the_bound_on_lognormal_load():
    load_LE = np.random.default_rng(0).lognormal(sigma=0.8, size=(6, 256))
    none = Placement.contiguous(6, 256, 32).gpu_load(load_LE)
    assert (none.max(1) / none.mean(1)).mean() > 1.6
    assert plan(load_LE, num_slots=320, num_gpus=32).metrics["max_over_mean"] < 1.01
    assert plan(load_LE, num_slots=320, num_gpus=32, num_nodes=4, num_groups=8).metrics["max_over_mean"] < 1.09


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


@pytest.mark.parametrize(
    ("value", "shown"), [(float("nan"), "nan"), (float("inf"), "inf"), (-1.0, "-1.0")], ids=["nan", "inf", "negative"]
)
def test_a_bad_load_names_field_layer_and_value(value, shown):
    load_LE = np.ones((3, 4))
    load_LE[2, 1] = value
    with pytest.raises(ValueError, match=rf"load_LE\[layer 2, expert 1\] = {shown}"):
        plan(load_LE, num_gpus=2)
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        check_load(np.ones(4))
    with pytest.raises(ValueError, match="dtype"):
        check_load(np.array([["a"]]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_slots": 7, "num_gpus": 4}, "num_slots=7 is not a multiple of num_gpus=4; use 4 or 8"),
        ({"num_slots": 4, "num_gpus": 4}, "num_slots=4 cannot hold 8 experts; use at least 8"),
        ({"num_gpus": 0}, "num_gpus=0"),
        ({"num_gpus": 4, "num_groups": 3}, "num_groups=3 does not divide the 8 experts"),
        ({"num_slots": 20, "num_gpus": 2}, "num_slots=20: 10 slots per GPU are more than the 8 experts.*at most 16"),
        ({"num_gpus": 4, "max_moves_per_layer": 2}, "max_moves_per_layer.*need current"),
        ({"num_gpus": 4, "current": Placement.contiguous(1, 4, 4)}, "current has 4 experts.*say 8"),
        ({"num_gpus": 4, "current": np.arange(8)[None]}, "current is a ndarray; it must be a Placement"),
        ({"num_gpus": 4, "threads": 0.5}, "threads=0.5: must be an integer of at least 1"),
        ({"num_gpus": 4, "current": Placement.contiguous(2, 8, 4)}, "current has 2 layers.*say 1"),
        ({"num_gpus": 4, "gpu_speed": [1, 1, -1, 1]}, r"gpu_speed\[GPU 2\] = -1.0"),
        ({"num_gpus": 4, "gpu_speed": [1, 1]}, r"gpu_speed has shape \(2,\)"),
        ({"num_gpus": 4, "usable_slots": [[2, 2, 2, 3]]}, r"usable_slots\[layer 0, GPU 3\] = 3: .* 2 slots"),
        ({"num_gpus": 4, "usable_slots": [2, 2, 2, 1]}, r"usable_slots\[layer 0\]: 7 slots on 4 GPUs cannot hold 8"),
        ({"num_gpus": 4, "gpu_speed": [1, 1, 1, 0]}, r"usable_slots\[layer 0\]: 6 slots on 3 GPUs cannot hold 8"),
        ({"num_gpus": 4, "min_gpus_per_expert": 2}, "cannot hold 8 experts on 2 GPUs each"),
        ({"num_gpus": 4, "min_gpus_per_expert": 5}, "min_gpus_per_expert=5: must be from 1 to num_gpus=4"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(np.ones((1, 8)), **arguments)


def test_rebalance_experts_has_eplb_shapes():
    # The call of EPLB's README: 2 layers of 12 experts, 16 slots, 4 groups, 2 nodes, 8 GPUs.
    weight = np.array(
        [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
    )
    phy2log, log2phy, logcnt = rebalance_experts(weight, 16, 4, 2, 8)
    assert phy2log.shape == (2, 16) and logcnt.shape == (2, 12) and log2phy.shape == (2, 12, logcnt.max())
    assert {a.dtype for a in (phy2log, log2phy, logcnt)} == {np.dtype(np.int64)}
    assert (logcnt.sum(1) == 16).all()
    # The same experts are doubled as in EPLB's published result.
    assert np.argwhere(logcnt == 2).tolist() == [[0, 1], [0, 4], [0, 5], [0, 10], [1, 1], [1, 5], [1, 6], [1, 8]]
    with pytest.raises(ValueError, match=r"weight\[layer 0, expert 1\] = 1e\+39: EPLB plans in fp32"):
        rebalance_experts(np.array([[1.0, 1e39]]), 2, 1, 1, 1)


# ---- files and the command line ------------------------------------------------------------------------------------


def test_npz_and_json_loads_agree(tmp_path):
    load_WLE = np.arange(12.0).reshape(2, 2, 3)
    np.savez(tmp_path / "a.npz", load=load_WLE)
    (tmp_path / "a.json").write_text(json.dumps({"load": load_WLE.tolist()}))
    for name in ("a.npz", "a.json"):
        file = read_load(tmp_path / name)
        np.testing.assert_array_equal(file.load_WLE, load_WLE)
        np.testing.assert_array_equal(file.total(), load_WLE.sum(0))
        np.testing.assert_array_equal(file.total(last=1), load_WLE[1])
        with pytest.raises(ValueError, match="last=3: the file holds 2 windows"):
            file.total(last=3)


def test_a_servers_answer_is_a_load_file(tmp_path):
    path = tmp_path / "load.json"
    layers = [{"layer": 1, "per_rank": [3, 3], "per_expert": [1, 2, 3], "skew": 1.0}] * 2
    path.write_text(json.dumps({"schema": "eprt.load/1", "num_experts": 3, "ranks": [], "layers": layers}))
    assert read_load(path).total().tolist() == [[1.0, 2.0, 3.0]] * 2
    path.write_text(json.dumps({"schema": "eprt.load/1", "num_experts": 0, "ranks": [], "layers": []}))
    with pytest.raises(ValueError, match="had not counted any load yet"):
        read_load(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "a.json: not JSON: Expecting"),
        ("a.json", "[]", "expected an object with a field 'load'"),
        ("a.json", '{"load": [[1, 2], [3]]}', "equally long lists"),
        ("a.json", '{"load": [[1, -2]]}', r"window 0: load\[layer 0, expert 1\] = -2.0"),
        ("a.json", '{"load": []}', "shape"),
        ("a.pt", "", "not a complete torch.save file"),
        ("a.npz", "not a zip", "a.npz"),
    ],
)
def test_a_bad_load_file_is_named(tmp_path, capsys, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_load(tmp_path / name)
    assert main(["plan", "--load", str(tmp_path / name), "--num-gpus", "1"]) == 2
    assert name in capsys.readouterr().err


def test_plan_command_writes_a_placement_that_loads(tmp_path, capsys):
    load_LE = np.random.default_rng(1).lognormal(size=(3, 16))
    np.savez(tmp_path / "load.npz", load=load_LE)
    out = tmp_path / "placement.json"
    arguments = ["--load", str(tmp_path / "load.npz"), "--num-gpus", "4", "--num-slots", "20", "--out", str(out)]
    assert main(["plan", *arguments]) == 0
    assert "global" in capsys.readouterr().err
    placement = Placement.load(out)
    np.testing.assert_array_equal(
        placement.physical_to_logical_map, plan(load_LE, num_slots=20, num_gpus=4).physical_to_logical_map
    )
    assert set(json.loads(out.read_text())) >= {"physical_to_logical_map", "num_nodes", "num_gpus", "epoch", "metrics"}


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
