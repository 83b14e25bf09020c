"""Shared options, and the arguments of plan() that follow from them."""

import argparse
import json

import numpy as np
import pytest
from eprt.balancer import Placement, RoutingTrace
from eprt.balancer.commands import options


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_cluster(parser)
    options.add_traffic(parser)
    return parser.parse_args(words)


def test_the_cluster_defaults_to_the_fewest_slots_and_equal_gpus():
    cluster = options.cluster_arguments(parse("--num-gpus", "3"), num_experts=8)
    assert cluster["num_slots"] == 9 and "gpu_speed" not in cluster and "usable_slots" not in cluster


def test_masked_gpus_have_speed_0():
    cluster = options.cluster_arguments(parse("--num-gpus", "3", "--gpu-speed", "1,2,3", "--masked-gpus", "1"), 8)
    assert cluster["gpu_speed"].tolist() == [1, 0, 3]
    only = options.cluster_arguments(parse("--num-gpus", "3", "--masked-gpus", "0,2"), 8)
    assert only["gpu_speed"].tolist() == [0, 1, 0]


def test_the_start_leaves_masked_gpus_empty():
    cluster = options.cluster_arguments(parse("--num-gpus", "3", "--num-slots", "12", "--masked-gpus", "1"), 5)
    placement = options.contiguous_placement((2, 5), cluster)
    assert placement.physical_to_logical_map.tolist() == [[0, 1, 2, -1, -1, -1, -1, -1, 3, 4, -1, -1]] * 2
    with pytest.raises(ValueError, match="num_slots=12: 2 GPUs cannot hold 9 experts"):
        options.contiguous_placement((2, 9), cluster)


def test_lists_are_read_or_refused(capsys):
    assert parse("--num-gpus", "2", "--gpu-speed", "1,0.5").gpu_speed == [1.0, 0.5]
    for flag, text, words in (("--gpu-speed", "1,x", "numbers"), ("--masked-gpus", "1.5", "integers")):
        with pytest.raises(SystemExit):
            parse("--num-gpus", "2", flag, text)
        assert f"'{text}' is not a comma-separated list of {words}" in capsys.readouterr().err


def test_any_source_forgets_the_ranks():
    trace = RoutingTrace((np.array([[0]]),), (np.array([1]),))
    assert options.usable_trace(parse("--num-gpus", "2"), trace) is trace
    assert options.usable_trace(parse("--num-gpus", "2", "--any-source"), trace).source_gpu is None


def test_a_placement_may_leave_its_cluster_to_the_flags(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"physical_to_logical_map": [[0, 1, 2, 3]]}))
    placement = options.read_placement(path, 4, 2)
    assert (placement.num_gpus, placement.num_nodes) == (4, 2)
    Placement.contiguous(1, 4, 2).save(path)
    assert options.read_placement(path, 4, 2).num_gpus == 2, "the file knows better"
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"p\.json: a list at the top level; expected a placement"):
        options.read_placement(path, 4, 2)


@pytest.mark.parametrize("cell, shown", [("[1]", r"\[1\]"), ("[1, 2]", r"\[1, 2\]"), ('{"a": 1}', '{"a": 1}')])
def test_a_slot_that_holds_a_list_is_named(tmp_path, cell, shown):
    path = tmp_path / "p.json"
    path.write_text(f'{{"physical_to_logical_map": [[0, 1], [0, {cell}]]}}')
    words = rf"p.json: physical_to_logical_map\[layer 1, slot 1\] is {shown}: must be one expert's number, or -1$"
    with pytest.raises(ValueError, match=words):
        options.read_placement(path, 2, 1)


def test_flags_of_traffic_that_were_not_given_have_their_defaults_in_the_plan():
    parser = argparse.ArgumentParser()
    options.add_traffic(parser, optional=True)
    default = options.traffic_arguments(parser.parse_args([]))
    assert default == options.traffic_arguments(parse("--num-gpus", "2"))
    given = options.traffic_arguments(parser.parse_args(["--balance-allowance", "0"]))
    assert given["balance_allowance"] == 0
