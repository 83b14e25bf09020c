"""The planning job: requests and answers as they travel, in this process and in one of its own."""

import io
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from eprt.balancer import Placement, RoutingTrace, job, plan
from eprt.balancer.job import PlanAnswer, PlanRequest, solve

RNG = np.random.default_rng(0)
LOAD_LE = RNG.lognormal(0, 0.8, (3, 16))
TRACE = RoutingTrace(tuple(RNG.integers(0, 16, (3, 200, 2))), tuple(RNG.integers(0, 4, (3, 200))))
CURRENT = Placement.contiguous(3, 16, 4, num_slots=20)


def replay(answer: PlanAnswer, current: Placement) -> np.ndarray:
    """The rows after all rounds; every arrival must come from a GPU that holds the expert."""
    rows_LP, per_gpu = current.physical_to_logical_map.copy(), current.num_slots_per_gpu
    for one in answer.rounds:
        for stream in (stream for wave in one.waves for stream in wave):
            assert stream.expert in rows_LP[stream.layer].reshape(-1, per_gpu)[stream.source]
        for layer, row in one.rows.items():
            rows_LP[layer] = row
    return rows_LP


def same(a: PlanAnswer, b: PlanAnswer) -> bool:
    return {**a.to_json(), "seconds": 0} == {**b.to_json(), "seconds": 0}


def test_the_answer_leads_from_here_to_a_better_placement():
    answer = solve(PlanRequest(CURRENT, load_LE=LOAD_LE))
    np.testing.assert_array_equal(replay(answer, CURRENT), answer.target.physical_to_logical_map)
    before, after = (p.gpu_load(LOAD_LE).max(1).mean() for p in (CURRENT, answer.target))
    assert after < before and sum(answer.moves.values()) > 0 and answer.seconds > 0
    for layer, weight_P in answer.weights.items():
        np.testing.assert_allclose(weight_P, answer.target.weight_LP[layer])


def test_the_budget_of_moves_holds():
    answer = solve(PlanRequest(CURRENT, load_LE=LOAD_LE, max_moves_per_layer=1))
    new_LP = answer.target.physical_to_logical_map
    filled_L = ((new_LP != CURRENT.physical_to_logical_map) & (new_LP >= 0)).sum(1)
    assert filled_L.tolist() == [1, 1, 1] and sum(answer.moves.values()) == 3


def test_a_target_is_reached_as_it_is_and_where_it_is_reached_already_nothing_happens():
    target = plan(LOAD_LE, num_slots=20, num_gpus=4)
    answer = solve(PlanRequest(CURRENT, target))
    np.testing.assert_array_equal(replay(answer, CURRENT), target.physical_to_logical_map)
    again = solve(PlanRequest(target, target))
    assert again.rounds == () and again.weights == {} and sum(again.moves.values()) == 0


def test_new_weights_alone_are_a_round_without_a_copy():
    rows_LP = np.array([[0, 1, 2, 0], [0, 1, 2, 0]])
    even, uneven = (
        Placement(rows_LP, 2, slot_weight=np.array([[a, 1, 1, 1 - a], [0.5, 1, 1, 0.5]])) for a in (0.5, 0.9)
    )
    answer = solve(PlanRequest(even, uneven))
    assert [(set(one.rows), one.waves) for one in answer.rounds] == [({0}, ())]
    assert answer.weights == {0: (0.9, 1, 1, pytest.approx(0.1))}


def test_a_slow_gpu_gets_less():
    load_LE = np.ones((2, 16))
    current = plan(load_LE, num_slots=20, num_gpus=4)
    speed_G = np.array([1, 1, 0.4, 1])
    target = solve(PlanRequest(current, load_LE=load_LE, gpu_speed=speed_G)).target
    load_LG = target.gpu_load(load_LE)
    assert (load_LG[:, 2] < 0.6 * load_LG[:, [0, 1, 3]].mean(1)).all(), load_LG
    time_LG = load_LG / speed_G
    assert time_LG.max() < (current.gpu_load(load_LE) / speed_G).max() / 1.5


def test_nodes_decide_which_way_copies_take():
    current = Placement.contiguous(1, 4, 4)
    target = Placement(np.array([[1, 0, 3, 2]]), 4)
    assert solve(PlanRequest(current, target)).moves == {"local": 4, "network": 0, "fan_out": 0}
    across = solve(PlanRequest(current, target, node_of_gpu=(0, 1, 0, 1)))
    assert across.moves == {"local": 0, "network": 4, "fan_out": 0}


@pytest.mark.parametrize(
    "request_",
    [
        PlanRequest(CURRENT, load_LE=LOAD_LE, gpu_speed=np.array([1, 1, 0.5, 1]), max_moves_per_layer=3, spare=1),
        PlanRequest(CURRENT, plan(LOAD_LE, num_slots=20, num_gpus=4), node_of_gpu=(0, 0, 1, 1)),
        PlanRequest(Placement.contiguous(3, 16, 4, 20, num_nodes=2), load_LE=LOAD_LE, trace=TRACE),
    ],
)
def test_a_process_of_its_own_answers_the_same(request_):
    sent = request_.to_bytes()
    assert PlanRequest.from_bytes(sent).to_bytes() == sent
    done = subprocess.run(
        [sys.executable, "-m", "eprt.balancer.job"], input=sent, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert same(PlanAnswer.from_json(json.loads(done.stdout)), solve(request_))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"load_LE": None}, "neither target nor load_LE"),
        ({"load_LE": LOAD_LE[:2]}, "current has 3 layers, load and arguments say 2"),
        ({"load_LE": np.full((3, 16), np.nan)}, "load_LE[layer 0, expert 0] = nan"),
        ({"gpu_speed": np.ones(2)}, "gpu_speed has shape (2,)"),
        ({"target": Placement.contiguous(2, 16, 4, 20)}, "(3, 20) and (2, 20)"),
        ({}, "the request has no 'current'"),
    ],
)
def test_what_cannot_be_met_is_one_line_and_status_2(change, words, monkeypatch, capsys):
    sent = replace(PlanRequest(CURRENT, load_LE=LOAD_LE), **change).to_bytes()
    sent = sent if change else sent.replace(b'"current"', b'"present"')
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(sent)))
    monkeypatch.setattr("os.nice", lambda by: 0)
    assert job.main() == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
