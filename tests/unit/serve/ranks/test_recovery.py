"""Recovery placement: what is held stays, what is missing is loaded once, too few slots are refused."""

import numpy as np
import pytest

from eprt.serve.ranks.recovery import (
    CapacityError,
    check_capacity,
    count_missing,
    recovery_rows,
    rows_without_loading,
)


def test_what_is_held_stays_and_lost_slots_are_empty():
    rows = recovery_rows({0: [[0, 1, -1]], 2: [[2, 3, -1]]}, num_ranks=3, num_experts=4)
    assert rows == [[0, 1, -1, -1, -1, -1, 2, 3, -1]]


def test_missing_experts_take_empty_slots_first_spread_over_ranks():
    (row,) = recovery_rows({0: [[0, 1, -1]], 2: [[2, 2, -1]]}, num_ranks=3, num_experts=5)
    assert row == [0, 1, 3, -1, -1, -1, 2, 2, 4]


def test_then_slots_of_the_experts_with_most_replicas():
    (row,) = recovery_rows({0: [[0, 0, 1]], 1: [[0, 1, 2]]}, num_ranks=2, num_experts=4)
    assert row == [3, 0, 1, 0, 1, 2], "expert 0 has three slots"


def test_no_expert_loses_its_only_slot_whatever_is_missing():
    random = np.random.default_rng(5)
    for _ in range(200):
        num_ranks, num_slots = int(random.integers(1, 5)), int(random.integers(1, 6))
        num_experts = int(random.integers(1, num_ranks * num_slots + 1))
        contents = {r: random.integers(-1, num_experts, (3, num_slots)).tolist() for r in range(num_ranks)}
        rows = recovery_rows(contents, num_ranks + 1, num_experts)
        before = np.concatenate([np.array(contents[r]) for r in range(num_ranks)], axis=1)
        for row_S, before_S in zip(np.array(rows), before):
            assert set(row_S[: len(before_S)].tolist()) - {-1} == set(range(num_experts))
            assert (row_S[len(before_S) :] == -1).all()
            num_missing = num_experts - len(set(before_S.tolist()) - {-1})
            assert (row_S[: len(before_S)] != before_S).sum() == num_missing, "only missing experts are loaded"


def test_loads_of_all_layers_are_spread():
    rows = recovery_rows({0: [[0, -1]] * 4, 1: [[0, -1]] * 4}, num_ranks=2, num_experts=2)
    loaded = [rank for row in rows for rank in range(2) if row[2 * rank + 1] == 1]
    assert sorted(loaded) == [0, 0, 1, 1]


def test_a_model_without_experts_has_no_rows():
    assert recovery_rows({0: [], 1: []}, num_ranks=3, num_experts=0) == []


def test_too_few_slots_are_told_with_the_arithmetic():
    with pytest.raises(CapacityError, match=r"2 ranks of 2 slots per MoE layer hold 4 experts; the model has 5"):
        recovery_rows({0: [[0, 1]], 1: [[2, 3]]}, num_ranks=3, num_experts=5)


def test_capacity_is_checked_at_the_start_with_what_would_do():
    check_capacity(16, num_redundant=8, num_ranks=4, max_lost=1)
    check_capacity(0, num_redundant=0, num_ranks=2, max_lost=1)
    with pytest.raises(CapacityError, match=r"without 1 of 4 ranks, 3 ranks of 4 .* hold 12 .* has 16: .* 8 would do"):
        check_capacity(16, num_redundant=0, num_ranks=4, max_lost=1)
    with pytest.raises(CapacityError, match="4 ranks cannot lose 4: one must be left"):
        check_capacity(16, num_redundant=99, num_ranks=4, max_lost=4)


def test_what_ranks_would_load_is_left_out_and_every_other_expert_keeps_a_slot():
    rng = np.random.default_rng(3)
    for _ in range(200):
        num_ranks, num_slots = int(rng.integers(1, 5)), int(rng.integers(2, 6))
        num_experts = int(rng.integers(1, num_ranks * num_slots + 1))
        contents = {rank: rng.integers(-1, num_experts, (2, num_slots)).tolist() for rank in range(num_ranks)}
        rows = recovery_rows(contents, num_ranks + 1, num_experts)
        reduced = rows_without_loading(rows, contents)
        held = [{e for of in contents.values() for e in of[layer]} - {-1} for layer in range(2)]
        assert [set(row) - {-1} for row in reduced] == held
        assert count_missing(reduced, num_experts) == sum(num_experts - len(of) for of in held)
        for row, whole, layer in zip(reduced, rows, range(2)):
            for slot, expert in enumerate(whole):
                rank = slot // num_slots
                kept = rank in contents and expert in contents[rank][layer]
                assert row[slot] == (expert if kept else -1)
