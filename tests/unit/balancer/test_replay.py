"""Replays, recounted by hand."""

import numpy as np
import pytest
from eprt.balancer import LoadFile, Placement, RoutingTrace, plan, traffic_per_token
from eprt.balancer.replay import PolicyInput, TraceSplit, eplb_placement, policies, replay

from benchmarks.balancing.synthetic_load import drifting_load, topic_trace

OPTIONS = {"num_gpus": 8, "num_nodes": 4, "num_slots": 40, "num_groups": 1}


@pytest.fixture(scope="module")
def file() -> LoadFile:
    """32 experts, 6 windows that drift, tokens of a few topics."""
    trace = topic_trace(2, 1024, 32, 4, strength=1.5, num_topics=8, skew=0.3)
    return LoadFile(np.floor(drifting_load(6, 2, 32, sigma=0.4, step=0.15) * trace.load(32)), trace)


def test_a_replay_counts_what_it_says(file):
    """Recounted by hand: the policy's own plans, judged on the windows after them."""
    tokens = TraceSplit(file.trace)
    start = Placement.contiguous(2, 32, 8, 40, 4)
    goal = {"balance_allowance": 0.1}
    made = {}
    for name, policy in policies(OPTIONS, goal, 4, ["none", "eplb", "incremental", "affinity"]).items():
        made[name] = replay(name, policy, file.load_WLE, start, tokens=tokens)
        assert made[name].load_VLG.shape == (5, 2, 8) and len(made[name].moves_V) == 5
        np.testing.assert_allclose(made[name].load_VLG.sum(2), file.load_WLE[1:].sum(2))
    assert made["none"].moves_V.tolist() == [0] * 5
    first = plan(file.load_WLE[0], **OPTIONS)
    second = plan(file.load_WLE[1], current=first, max_moves_per_layer=4, **OPTIONS)
    np.testing.assert_array_equal(made["incremental"].load_VLG[1], second.gpu_load(file.load_WLE[2]))
    assert (made["incremental"].moves_V[1:] <= 8).all() and made["eplb"].later_moves > 3 * made[
        "incremental"
    ].later_moves
    assert made["affinity"].traffic_V.mean() < 0.9 * made["eplb"].traffic_V.mean()
    for one in made.values():
        np.testing.assert_allclose(one.max_over_mean_V[0], (one.load_VLG[0].max(1) / one.load_VLG[0].mean(1)).mean())
        assert (one.balance_ratio_V <= 1).all()
    rare = replay("rare", policies(OPTIONS, None, 4, ["eplb"])["eplb"], file.load_WLE, start, every=2, memory=2)
    assert rare.moves_V[1] == rare.moves_V[3] == 0 < rare.moves_V[2]


def test_a_replay_looks_at_no_token_before_its_window(file):
    """A trace that knows its windows: planned with what came before, counted on the window judged."""
    rng = np.random.default_rng(0)
    window_LT = [rng.integers(-1, 6, len(topk_TK)) for topk_TK in file.trace.topk_idx]
    window_LT[0][window_LT[0] == 4] = window_LT[1][window_LT[1] == 4] = 3  # nothing was sampled in window 4
    trace = RoutingTrace(file.trace.topk_idx, None, tuple(window_LT))
    start, looked = Placement.contiguous(2, 32, 8, 40, 4), []

    def affinity(seen: PolicyInput) -> Placement:
        looked.append(seen.trace)
        return plan(seen.load_LE, coactivation=seen.trace, **OPTIONS)

    made = replay("affinity", affinity, file.load_WLE, start, tokens=TraceSplit(trace))
    for window, seen in enumerate(looked, start=1):
        placement = plan(file.load_WLE[window - 1], coactivation=seen, **OPTIONS)
        for layer in range(2):
            np.testing.assert_array_equal(
                seen.topk_idx[layer], trace.topk_idx[layer][window_LT[layer] < window], f"window {window}"
            )
        if window != 4:
            want = traffic_per_token(placement, trace.in_windows(window, window + 1)).mean()
            assert made.traffic_V[window - 1] == pytest.approx(want)
    assert made.traffic_V[3] == made.traffic_V[2]
    grouped = LoadFile(file.load_WLE, trace).regrouped(3).trace
    np.testing.assert_array_equal(grouped.window[0], np.where(window_LT[0] < 0, -1, window_LT[0] // 2))


def test_without_windows_every_other_token_is_planned_with(file):
    tokens = TraceSplit(file.trace)
    for window in (1, 5):
        before, judged = tokens.tokens_before(window), tokens.judged_tokens(window)
        for layer, topk_TK in enumerate(file.trace.topk_idx):
            np.testing.assert_array_equal(before.topk_idx[layer], topk_TK[0::2])
            np.testing.assert_array_equal(judged.topk_idx[layer], topk_TK[1::2])


def test_layers_without_load_do_not_count(file):
    start, load_WLE = Placement.contiguous(2, 32, 8, 40, 4), file.load_WLE.copy()
    load_WLE[1:, 1] = 0
    load_WLE[2] = 0
    made = replay("none", lambda seen: seen.placement, load_WLE, start)
    want = made.load_VLG[0, 0].max() / made.load_VLG[0, 0].mean()
    assert made.max_over_mean_V[0] == pytest.approx(want) and made.balance_ratio_V[0] == pytest.approx(1 / want)
    assert made.max_over_mean_V[1] == made.balance_ratio_V[1] == 1, "a window without load is even"
    assert made.traffic_V is None


def test_eplb_plans_for_equal_gpus_only():
    with pytest.raises(ValueError, match="usable_slots: EPLB does not support it; leave out the policy eplb"):
        eplb_placement(np.ones((1, 32)), {**OPTIONS, "usable_slots": 4})
    assert eplb_placement(np.ones((1, 32)), OPTIONS).num_nodes == 4
