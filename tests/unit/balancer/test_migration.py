"""Rounds from one placement to another: valid after each, within memory, and ending where they should."""

import numpy as np
import pytest
from eprt.balancer.migration import Round, arrivals, count_moves, schedule_rounds


def random_row(rng: np.random.Generator, num_experts: int, num_gpus: int, per_gpu: int) -> np.ndarray:
    """A valid row; with some luck empty slots, and replicas on one GPU too."""
    spare = rng.integers(-1, num_experts, num_gpus * per_gpu - num_experts)
    return rng.permutation(np.concatenate([np.arange(num_experts), spare]))


def check(current_LP, target_LP, node_of_gpu, spare):
    rounds = schedule_rounds(current_LP, target_LP, node_of_gpu, spare)
    state_LP, num_gpus = current_LP.copy(), len(node_of_gpu)
    num_experts = current_LP.max() + 1
    for one in rounds:
        assert Round.from_json(one.to_json()) == one
        arriving = [(layer, *a) for layer, row in one.rows.items() for a in arrivals(state_LP[layer], row, num_gpus)]
        per_gpu = np.bincount([gpu for _, _, gpu in arriving], minlength=num_gpus)
        assert per_gpu.max() <= spare
        sent = [(s.layer, s.expert, r) for wave in one.waves for s in wave for r in s.readers]
        assert sorted(sent) == sorted(arriving), "every arrival travels exactly once"
        for wave in one.waves:
            sources, readers = [s.source for s in wave], [r for s in wave for r in s.readers]
            assert len(set(sources)) == len(sources) and len(set(readers)) == len(readers)
        for stream in (s for wave in one.waves for s in wave):
            held = state_LP[stream.layer].reshape(num_gpus, -1)
            assert stream.expert in held[stream.source]
            for reader in stream.readers:
                near = [
                    g for g in range(num_gpus) if stream.expert in held[g] and node_of_gpu[g] == node_of_gpu[reader]
                ]
                assert not near or node_of_gpu[stream.source] == node_of_gpu[reader], "it came from a nearer holder"
        for layer, row in one.rows.items():
            state_LP[layer] = row
        assert all(set(range(num_experts)) <= set(row) for row in state_LP)
    assert np.array_equal(state_LP, target_LP)
    assert count_moves(rounds, node_of_gpu)["network"] == len(entries(current_LP, target_LP, node_of_gpu))
    return rounds


def entries(current_LP, target_LP, node_of_gpu) -> set[tuple[int, int, int]]:
    """(layer, expert, node) wherever a node gets an expert that none of its GPUs holds: what must cross, once."""
    held, wanted = (
        {
            (layer, int(e), node_of_gpu[gpu])
            for (layer, gpu, _), e in np.ndenumerate(rows.reshape(len(rows), len(node_of_gpu), -1))
            if e >= 0
        }
        for rows in (current_LP, target_LP)
    )
    return wanted - held


def test_random_placements():
    rng = np.random.default_rng(0)
    for _ in range(300):
        num_gpus = int(rng.integers(1, 9))
        node_of_gpu = sorted(rng.integers(0, 3, num_gpus).tolist())
        num_experts = int(rng.integers(1, 25))
        per_gpu = -(-num_experts // num_gpus) + int(rng.integers(0, 3))
        current, target = (
            np.stack([random_row(rng, num_experts, num_gpus, per_gpu) for _ in range(3)]) for _ in range(2)
        )
        check(current, target, node_of_gpu, spare=int(rng.integers(1, 4)))


def test_no_redundancy_trades_places_around_the_circle():
    """Three full GPUs, every expert the last of its kind: with room for one, all three move in one round."""
    (one,) = check(np.array([[0, 1, 2]]), np.array([[2, 0, 1]]), [0, 0, 0], spare=1)
    assert len(one.waves) == 1 and len(one.waves[0]) == 3


def test_moves_inside_a_gpu_move_nothing():
    (one,) = check(np.array([[0, 1, 2, 3]]), np.array([[1, 0, 3, 2]]), [0, 0], spare=1)
    assert one.waves == ()


def test_an_expert_enters_a_node_once():
    """Expert 0 of node 0 goes to both GPUs of node 1, and to its neighbour in node 0."""
    current = np.array([[0, -1, 1, -1, 2, -1, 3, -1]])
    target = np.array([[0, -1, 1, 0, 2, 0, 3, 0]])
    rounds = check(current, target, [0, 0, 1, 1], spare=2)
    assert count_moves(rounds, [0, 0, 1, 1]) == {"local": 1, "network": 1, "fan_out": 1}


def test_what_a_node_holds_does_not_cross_again():
    """Expert 4 changes GPUs inside node 1, and node 0 has it, too: its GPU in node 1 must not drop it before the other
    one has it. Only expert 0 crosses."""
    current, target = np.array([[4, 1, 3, 0, 1, 4, 2, 3]]), np.array([[1, 4, 3, 0, 1, 2, 0, 4]])
    rounds = check(current, target, [0, 0, 1, 1], spare=1)
    assert count_moves(rounds, [0, 0, 1, 1])["network"] == 1


def test_layers_share_rounds():
    """One move in each of four layers, onto four different GPUs: one round, and one wave."""
    current = np.array([[0, -1, 1, -1, 2, -1, 3, -1]] * 4)
    target = current.copy()
    for layer in range(4):
        target[layer, 2 * layer + 1] = (layer + 1) % 4
    (one,) = check(current, target, [0] * 4, spare=1)
    assert len(one.rows) == 4 and len(one.waves) == 1


def test_equal_placements_need_no_round():
    assert schedule_rounds(np.array([[0, 1]]), np.array([[0, 1]]), [0, 0]) == []


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"shapes \(1, 2\) and \(1, 4\)"):
        schedule_rounds(np.array([[0, 1]]), np.array([[0, 1, 0, 1]]), [0, 0])
    with pytest.raises(ValueError, match="spare=0"):
        schedule_rounds(np.array([[0, 1]]), np.array([[1, 0]]), [0, 0], spare=0)
