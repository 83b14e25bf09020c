"""eprt balance plan."""

import json

import numpy as np
import pytest
from eprt.balancer import Placement, plan, read_load
from eprt.balancer.__main__ import main

from tests.unit.balancer.commands.cases import CLUSTER, check_refused


def test_plan_uses_the_traces_when_told(load, tmp_path, capsys):
    out = tmp_path / "placement.json"
    assert main(["plan", "--load", str(load), *CLUSTER, "--out", str(out)]) == 0
    assert "also holds routing traces; --coactivation uses them" in capsys.readouterr().err
    assert main(["plan", "--load", str(load), *CLUSTER, "--out", str(out), "--coactivation"]) == 0
    assert "node_copies per token" in capsys.readouterr().err
    file = read_load(load)
    want = plan(file.total(), coactivation=file.trace, balance_allowance=0.02, num_gpus=8, num_nodes=4, num_slots=40)
    np.testing.assert_array_equal(Placement.load(out).physical_to_logical_map, want.physical_to_logical_map)


def test_plan_from_the_placement_in_force(load, tmp_path, capsys):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert main(["plan", "--load", str(load), "--last", "1", *CLUSTER, "--out", str(first)]) == 0
    more = ["--current", str(first), "--max-moves-per-layer", "2", "--out", str(second)]
    assert main(["plan", "--load", str(load), "--num-gpus", "8", "--num-nodes", "4", *more]) == 0
    moved = (Placement.load(first).physical_to_logical_map != Placement.load(second).physical_to_logical_map).sum(1)
    assert (moved <= 2).all() and moved.any()
    assert "slots move" in capsys.readouterr().err
    # SGLang's file says nothing of the cluster: the arguments do.
    slots = json.loads(first.read_text())["physical_to_logical_map"]
    (tmp_path / "sglang.json").write_text(json.dumps({"physical_to_logical_map": slots}))
    more = ["--current", str(tmp_path / "sglang.json"), "--out", str(second)]
    assert main(["plan", "--load", str(load), "--num-gpus", "8", "--num-nodes", "4", *more]) == 0


def test_constraints_reach_the_plan(load, tmp_path):
    out = tmp_path / "placement.json"
    more = ["--masked-gpus", "2", "--num-slots", "80", "--min-gpus-per-expert", "2"]
    assert main(["plan", "--load", str(load), "--num-gpus", "8", *more, "--out", str(out)]) == 0
    placement = Placement.load(out)
    slots_LGS = placement.physical_to_logical_map.reshape(2, 8, 10)
    assert (slots_LGS[:, 2] == -1).all() and placement.replica_count.min() >= 2
    more = ["--usable-slots", "4", "--gpu-speed", "1,1,1,1,2,2,2,2"]
    assert main(["plan", "--load", str(load), *CLUSTER, *more, "--out", str(out)]) == 0
    slots_LGS = Placement.load(out).physical_to_logical_map.reshape(2, 8, 5)
    assert ((slots_LGS == -1).sum(2) == 1).all(), "a slot of each GPU stays empty"
    load_LG = Placement.load(out).gpu_load(read_load(load).total())
    assert (load_LG[:, 4:].mean(1) > 1.4 * load_LG[:, :4].mean(1)).all(), "twice as fast, more to do"


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [*CLUSTER, "--current", "OTHER"],
            "current has 16 experts, load and arguments say 32: it belongs to another",
        ),
        ([*CLUSTER, "--masked-gpus", "8"], "--masked-gpus: 8 is not one of the GPUs 0 to 7"),
        (["--num-gpus", "8", "--num-slots", "41"], "num_slots=41 is not a multiple of num_gpus=8; use 40 or 48"),
        (["--num-gpus", "8", "--num-slots", "0"], "num_slots=0: must be an integer of at least 1"),
        ([*CLUSTER, "--coactivation", "OTHER"], "none of the fields 'load'"),
        ([*CLUSTER, "--max-moves-per-layer", "3"], "they need current"),
    ],
)
def test_what_cannot_be_planned_is_named(load, tmp_path, capsys, words, message):
    check_refused(load, tmp_path, capsys, ["plan", *words], message)
