"""Scores: what is learnt from measurements, and ties."""

import random

import pytest

from eprt.serve.instances.scores import PrefillRate, choose


def test_the_speed_of_prompts_follows_what_is_measured():
    rate = PrefillRate()
    for _ in range(60):
        rate.add_prompt(200, 0.5)
    rate.add_prompt(0, 1.0)
    rate.add_prompt(10, 0.0)
    assert rate.tokens_per_s == pytest.approx(400, rel=1e-3)
    assert rate.predict_ms(40) == pytest.approx(100, rel=1e-3)


def test_ties_are_drawn():
    rng, scores = random.Random(0), {"a": 1.0, "b": 1.04, "c": 1.2}
    assert {choose(list(scores), scores.__getitem__, rng) for _ in range(50)} == {"a", "b"}
    assert {choose(["x", "y"], lambda one: 0.0, rng) for _ in range(50)} == {"x", "y"}
