import itertools
import random

import pytest

from eprt.cluster.crossings import ExpertChoice, experts_elsewhere, experts_touched, parts_elsewhere, parts_hit


@pytest.mark.parametrize(
    "gate",
    [
        ExpertChoice(12, 3),
        ExpertChoice(12, 5),
        ExpertChoice(12, 3, 4, 2),
        ExpertChoice(12, 3, 6, 2),
        ExpertChoice(16, 4, 4, 3),
        ExpertChoice(8, 8),
    ],
    ids=str,
)
def test_the_mean_over_all_choices_is_the_formula(gate):
    size = gate.num_experts // gate.num_groups
    choices = [
        chosen
        for groups in itertools.combinations(range(gate.num_groups), gate.num_chosen_groups)
        for chosen in itertools.combinations([g * size + i for g in groups for i in range(size)], gate.top_k)
    ]
    for num_parts in (1, 2, 4, gate.num_experts):
        if gate.num_groups % num_parts and num_parts % gate.num_groups:
            continue
        per_part = gate.num_experts // num_parts
        mean = sum(len({expert // per_part for expert in chosen}) for chosen in choices) / len(choices)
        assert parts_hit(gate, num_parts) == pytest.approx(mean)


def test_parts_that_hold_unequally_many_groups_are_close():
    gate, rng = ExpertChoice(256, 8, 8, 4), random.Random(0)
    hits = 0
    for _ in range(20_000):
        groups = rng.sample(range(8), 4)
        chosen = rng.sample([g * 32 + i for g in groups for i in range(32)], 8)
        hits += len({expert * 3 // 256 for expert in chosen})
    assert parts_hit(gate, 3) == pytest.approx(hits / 20_000, rel=0.005)


def test_known_values():
    free = ExpertChoice(256, 8)
    assert [round(parts_hit(free, n), 3) for n in (2, 4, 8, 16, 32)] == [1.993, 3.614, 5.295, 6.523, 7.267]
    assert round(parts_elsewhere(ExpertChoice(256, 8, 8, 4), 8), 3) == 3.175
    assert parts_elsewhere(free, 1) == experts_elsewhere(free, 1) == 0
    assert experts_elsewhere(free, 4) == 6


def test_experts_that_receive_a_token():
    gate = ExpertChoice(256, 8)
    assert experts_touched(gate, 32, 0, 256) == 0
    assert experts_touched(gate, 32, 1, 256) == pytest.approx(1, rel=0.02)  # 8 of 256 experts, an eighth of them here
    assert experts_touched(gate, 32, 10_000, 256) == pytest.approx(32)
