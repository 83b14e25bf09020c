"""RoutingTrace: its checks, its parts, and what is counted from it."""

import numpy as np
import pytest
from eprt.balancer import RoutingTrace


@pytest.mark.parametrize("rows", [([[0, -2]], "layer 0, token 0, choice 1"), ([[0.5]], "dtype"), ([0, 1], "shape")])
def test_a_bad_trace_is_named(rows):
    topk, message = rows
    with pytest.raises(ValueError, match=message):
        RoutingTrace((np.array(topk),))


def small() -> RoutingTrace:
    """Two layers of 5 and 4 tokens."""
    topk = (np.array([[0, 1], [1, -1], [2, 0], [1, 2], [0, 1]]), np.array([[2, 1], [2, 0], [2, 1], [-1, -1]]))
    sources, windows = (np.arange(5), np.arange(4)), (np.array([-1, 0, 0, 1, 1]), np.array([0, 0, 1, 1]))
    return RoutingTrace(topk, sources, windows)


def test_choices_and_pairs_are_counted():
    trace = small()
    assert (trace.num_layers, trace.num_tokens) == (2, 5)
    assert trace.load(3).tolist() == [[3, 4, 2], [1, 2, 3]], "masked choices do not count"
    matrix_LEE = trace.coactivation(3)
    assert matrix_LEE[0].tolist() == [[3, 2, 1], [2, 4, 1], [1, 1, 2]]
    np.testing.assert_array_equal(np.diagonal(matrix_LEE, axis1=1, axis2=2), trace.load(3))


def test_parts_keep_sources_and_windows_with_their_tokens():
    trace = small()
    even, odd = trace.every_other(0), trace.every_other(1)
    assert [len(layer) for layer in even.topk_idx + odd.topk_idx] == [3, 2, 2, 2]
    assert even.source_gpu[0].tolist() == [0, 2, 4] and odd.window[0].tolist() == [0, 1]
    joined = RoutingTrace.joined([even, odd])
    assert joined.source_gpu[0].tolist() == [0, 2, 4, 1, 3] and (joined.load(3) == trace.load(3)).all()
    first = trace.in_windows(-1, 1)
    assert first.source_gpu[0].tolist() == [0, 1, 2] and first.source_gpu[1].tolist() == [0, 1]
    assert trace.renumbered_windows(np.array([5, 6])).window[0].tolist() == [-1, 5, 5, 6, 6]
    assert trace.without_sources().source_gpu is None and trace.without_sources().window is not None


def test_a_sample_is_drawn_without_replacement_and_keeps_the_order():
    trace = small().sample(3, seed=1)
    assert [len(layer) for layer in trace.topk_idx] == [3, 3]
    for source_T in trace.source_gpu:
        assert (np.diff(source_T) > 0).all()
    assert small().sample(100).source_gpu[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[[0]], [[0, 1]]],), r"topk_idx has \[1, 2\] choices per token; all layers need the same number"),
        (([[[0]]], [[0], [0]]), "source_gpu has 2 layers, topk_idx has 1"),
        (([[[0]]], [[0, 1]]), r"source_gpu\[layer 0\] has shape \(2,\); topk_idx has 1 tokens there"),
        (([[[0]]], [[2**40]]), r"source_gpu\[layer 0, token 0\] = 1099511627776: does not fit in 32 bits"),
        (([[[0]]], None, [[0.5]]), r"window\[layer 0\] has dtype float64"),
    ],
)
def test_parts_that_do_not_fit_together_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        RoutingTrace(*arguments)


def test_experts_ranks_and_windows_out_of_range_are_named():
    trace = small()
    trace.check_experts(3), trace.check_sources(5), trace.check_windows(2)
    with pytest.raises(ValueError, match=r"topk_idx\[layer 0, token 2, choice 0\] = 2: the model has experts 0 to 1"):
        trace.check_experts(2)
    with pytest.raises(ValueError, match=r"source_gpu\[layer 0, token 4\] = 4: must be from 0 to 3"):
        trace.check_sources(4)
    with pytest.raises(ValueError, match=r"topk_window\[layer 0, token 3\] = 1: load has windows 0 to 0"):
        trace.check_windows(1)
