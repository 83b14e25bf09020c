"""How long steps take, learnt from measured ones."""

import random

import pytest

from eprt.serve.tiers.step_model import StepModel


def test_a_steps_parts_are_found_again():
    model, rng = StepModel(), random.Random(0)
    for _ in range(800):
        rows, tokens = rng.randint(1, 64), rng.randint(10, 40_000)
        model.add_step(rows, tokens, 0.004 + 2e-4 * rows + 3e-7 * tokens)
    assert model.seconds_3.tolist() == pytest.approx([0.004, 2e-4, 3e-7], rel=0.05)
    assert model.predict_ms(10, 10_000) == pytest.approx(9.0, rel=0.05)


def test_more_is_never_predicted_to_be_faster():
    model = StepModel()
    for rows in (1, 8, 32):
        for _ in range(50):
            model.add_step(rows, 100 * rows, 0.01 / rows)  # nonsense
    assert model.predict_ms(64, 6400) >= model.predict_ms(1, 100)


def test_before_any_step_rows_and_tokens_count():
    model = StepModel()
    assert model.predict_ms(2, 100) > model.predict_ms(1, 100)
    assert model.predict_ms(1, 200) > model.predict_ms(1, 100)
