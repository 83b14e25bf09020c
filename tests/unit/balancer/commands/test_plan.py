"""eprt balance plan."""

import json

import numpy as np
import pytest
from eprt.balancer import Placement, export_placement, plan, read_load
from eprt.balancer.__main__ import main
from eprt.balancer.exports import TARGETS

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
        (["--num-gpus", "8", "--num-slots", "0"], "--num-slots 0: must be at least 1"),
        (["--num-gpus", "-1"], "--num-gpus -1: must be at least 1 and below 2\\^20"),
        (["--num-gpus", "9" * 30], "must be at least 1 and below 2\\^20"),
        (
            [*CLUSTER, "--usable-slots", str(2**33 + 2)],
            "--usable-slots 8589934594: must be at least 1 and below 2\\^31",
        ),
        (["--num-gpus", "8", "--num-slots", "2000000000"], "--num-slots 2000000000: no GPU .* twice; use at most 256"),
        ([*CLUSTER, "--gpu-speed", "1,1"], "--gpu-speed has 2 numbers: must be one for each of 8 GPUs"),
        ([*CLUSTER, "--gpu-speed", "1e308,1,1,1,1,1,1,1"], "--gpu-speed 1e\\+308: must be from 1e-06 to 1e\\+06, or 0"),
        ([*CLUSTER, "--gpu-speed", "1,1,1,1,1,1,1,nan"], "--gpu-speed nan: must be from"),
        ([*CLUSTER, "--masked-gpus", "0,1,2,3,4,5,6,7"], "every GPU is masked: none is left to hold experts"),
        ([*CLUSTER, "--first-layer", "3"], "--first-layer does nothing without --for"),
        ([*CLUSTER, "--bytes-per-expert", "3"], "--bytes-per-expert does nothing without --max-bytes"),
        ([*CLUSTER, "--traffic", "node_copies"], "--traffic does nothing without --coactivation: give both or none"),
        ([*CLUSTER, "--balance-allowance", "0"], "--balance-allowance does nothing without --coactivation"),
        ([*CLUSTER, "--any-source"], "--any-source does nothing without --coactivation"),
        ([*CLUSTER, "--out", "/"], "--out /: must name a file in a directory that can be written"),
        ([*CLUSTER, "--out", ""], "--out : must name a file in a directory that can be written"),
        ([*CLUSTER, "--out", "/missing/p.json"], "--out /missing/p.json: must name a file in a directory"),
        ([*CLUSTER, "--last", "0"], "--last 0: must be at least 1"),
        ([*CLUSTER, "--seed", "-1"], "--seed -1: must be at least 0"),
        ([*CLUSTER, "--balance-allowance", "nan"], "--balance-allowance nan: must be at least 0"),
        ([*CLUSTER, "--bytes-per-expert", "inf"], "--bytes-per-expert inf: must be above 0"),
        ([*CLUSTER, "--coactivation", "OTHER"], "none of the fields 'load'"),
        ([*CLUSTER, "--max-moves-per-layer", "3"], "they need current"),
    ],
)
def test_what_cannot_be_planned_is_named(load, tmp_path, capsys, words, message):
    check_refused(load, tmp_path, capsys, ["plan", *words], message)


@pytest.mark.parametrize("target", TARGETS)
def test_plans_for_other_systems_have_even_shares(target, load, tmp_path, capsys):
    out = tmp_path / f"placement{TARGETS[target].suffix}"
    assert main(["plan", "--load", str(load), *CLUSTER, "--for", target, "--first-layer", "3", "--out", str(out)]) == 0
    assert f"wrote {out} for {TARGETS[target].system} ({TARGETS[target].option})" in capsys.readouterr().err
    placement = plan(
        read_load(load).total(),
        num_gpus=8,
        num_nodes=4,
        num_slots=40,
        shares=TARGETS[target].shares,
    )
    assert out.read_text() == export_placement(placement, target, first_layer=3)


def test_the_load_says_which_layer_its_first_row_is(tmp_path, capsys):
    """SGLang's load has rows of zeros for dense layers; a plan for TensorRT-LLM counts them and leaves them out."""
    count_LE = np.random.default_rng(0).integers(1, 99, (4, 8))
    count_LE[0] = 0
    path = tmp_path / "sglang.json"
    path.write_text(json.dumps({"logical_count": count_LE.tolist()}))
    cluster = ["--load", str(path), "--num-gpus", "2", "--num-slots", "10"]
    assert main(["plan", *cluster, "--for", "trtllm"]) == 0
    text = capsys.readouterr().out
    want = plan(count_LE, num_gpus=2, num_slots=10, shares="even")
    assert text == export_placement(want, "trtllm", dense_rows=1) and text.splitlines()[2].startswith("  1: [")
    assert main(["plan", *cluster, "--for", "sglang"]) == 0
    assert len(json.loads(capsys.readouterr().out)["physical_to_logical_map"]) == 4


def test_shares_without_another_system(load, tmp_path):
    out = tmp_path / "placement.json"
    assert main(["plan", "--load", str(load), *CLUSTER, "--out", str(out)]) == 0
    assert Placement.load(out).slot_weight is not None
    assert main(["plan", "--load", str(load), *CLUSTER, "--shares", "even", "--out", str(out)]) == 0
    assert Placement.load(out).slot_weight is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--for", "sglang"], "does not say which of the model's layers.*--for sglang needs --first-layer"),
        (["--for", "sglang", "--out", "placement.pt"], "placement.pt: SGLang reads this format only.*ends in .json"),
        (["--for", "rtp", "--shares", "weighted"], "--shares weighted: RTP-LLM splits tokens evenly"),
        (["--for", "vllm", "--first-layer", "1", "--usable-slots", "4"], "slot 4 .GPU 0. is empty"),
    ],
)
def test_what_cannot_be_exported_is_named(load, tmp_path, capsys, words, message):
    check_refused(load, tmp_path, capsys, ["plan", *CLUSTER, *words], message)
