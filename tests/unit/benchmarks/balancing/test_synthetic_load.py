"""Synthetic loads and traces are what their docstrings say, and the same for a seed."""

import numpy as np
import pytest

from benchmarks.balancing.synthetic_load import drifting_load, lognormal_load, topic_trace, zipf_load


def test_loads_follow_their_distribution():
    load_LE = lognormal_load(40, 256, sigma=0.7)
    assert np.log(load_LE).std() == pytest.approx(0.7, rel=0.05)
    load_LE = zipf_load(3, 8, exponent=2.0)
    np.testing.assert_allclose(np.sort(load_LE)[:, ::-1], np.tile(np.arange(1, 9) ** -2.0, (3, 1)))
    assert (load_LE[0] != load_LE[1]).any(), "the order differs by layer"
    np.testing.assert_array_equal(zipf_load(3, 8, seed=1), zipf_load(3, 8, seed=1))


def test_drift_is_stationary_and_changes_the_stated_part():
    load_WLE = drifting_load(60, 4, 256, sigma=0.8, step=0.12)
    spread_W = np.log(load_WLE).std(axis=(1, 2))
    assert spread_W.min() > 0.7 and spread_W.max() < 0.9
    share_WLE = load_WLE / load_WLE.sum(2, keepdims=True)
    changed = np.abs(np.diff(share_WLE, axis=0)).sum(2).mean() / 2
    assert changed == pytest.approx(0.12 / 2.2, rel=0.15)
    still_WLE = drifting_load(3, 1, 4, step=0.0)
    np.testing.assert_allclose(still_WLE[0], still_WLE[2])


def test_topics_make_choices_of_a_model_that_depend_on_the_token_seed_alone():
    shape = dict(num_layers=2, num_tokens=600, num_experts=32, top_k=4, num_groups=4, top_groups=2, strength=2.0)
    trace, again, other = (topic_trace(**shape, token_seed=seed) for seed in (0, 0, 1))
    for layer in range(2):
        np.testing.assert_array_equal(trace.topk_idx[layer], again.topk_idx[layer])
        assert all(len(set(row)) == 4 for row in trace.topk_idx[layer].tolist()), "distinct experts"
        assert all(len({expert // 8 for expert in row}) <= 2 for row in trace.topk_idx[layer].tolist()), "of two groups"
    assert (trace.topk_idx[0] != other.topk_idx[0]).any()
    pairs, other_pairs = trace.coactivation(32)[0].ravel(), other.coactivation(32)[0].ravel()
    assert np.corrcoef(pairs, other_pairs)[0, 1] > 0.9, "the same model"


def test_the_trained_bias_evens_the_load_and_skew_undoes_it():
    shape = dict(num_layers=2, num_tokens=4096, num_experts=32, top_k=4, strength=1.0, num_topics=16)
    even, skewed = (topic_trace(**shape, skew=skew).load(32) for skew in (0.0, 1.0))
    assert (even.max(1) / even.mean(1) < 1.5).all() and (skewed.max(1) / skewed.mean(1) > 1.5).all()
