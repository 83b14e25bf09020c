"""LoadFile and the checks of loads."""

import numpy as np
import pytest
from eprt.balancer import LoadFile, RoutingTrace, check_load, plan


@pytest.mark.parametrize(
    ("value", "shown"), [(float("nan"), "nan"), (float("inf"), "inf"), (-1.0, "-1.0")], ids=["nan", "inf", "negative"]
)
def test_a_bad_load_names_field_layer_and_value(value, shown):
    load_LE = np.ones((3, 4))
    load_LE[2, 1] = value
    with pytest.raises(ValueError, match=rf"load_LE\[layer 2, expert 1\] = {shown}"):
        plan(load_LE, num_gpus=2)
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        check_load(np.ones(4))
    with pytest.raises(ValueError, match="dtype"):
        check_load(np.array([["a"]]))


def test_windows_are_added_up():
    load_WLE = np.arange(12.0).reshape(2, 2, 3)
    file = LoadFile(load_WLE)
    np.testing.assert_array_equal(file.total(), load_WLE.sum(0))
    np.testing.assert_array_equal(file.total(last=1), load_WLE[1])
    for last in (0, 3):
        with pytest.raises(ValueError, match=f"last={last}: the file holds 2 windows"):
            file.total(last=last)
    assert LoadFile(load_WLE[0]).load_WLE.shape == (1, 2, 3), "a single window may come without its dimension"


def test_windows_regroup_without_losing_load():
    load_WLE = np.arange(7.0 * 2 * 3).reshape(7, 2, 3)
    file = LoadFile(load_WLE)
    assert [file.regrouped(n).num_windows for n in (1, 3, 7)] == [1, 3, 7]
    np.testing.assert_array_equal(file.regrouped(3).load_WLE.sum(0), load_WLE.sum(0))
    np.testing.assert_array_equal(file.regrouped(7).load_WLE, load_WLE)
    with pytest.raises(ValueError, match="num_windows=8: the file holds 7 windows"):
        file.regrouped(8)


def test_a_trace_is_regrouped_with_its_windows():
    window_T = np.array([-1, 0, 1, 2, 3, 4, 5, 5])
    trace = RoutingTrace((np.zeros((8, 1), dtype=int),), window=(window_T,))
    grouped = LoadFile(np.ones((6, 1, 2)), trace).regrouped(3).trace
    assert grouped.window[0].tolist() == [-1, 0, 0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("load", "trace", "message"),
    [
        (np.ones((1, 1, 1, 1)), None, r"load has shape \(1, 1, 1, 1\)"),
        (np.ones((0, 2, 2)), None, r"load has shape \(0, 2, 2\)"),
        (np.array([[[1.0]], [[-1.0]]]), None, r"window 1: load\[layer 0, expert 0\] = -1.0"),
        (np.ones((1, 1)), RoutingTrace((np.array([[0]]),) * 2), "topk_idx has 2 layers, load has 1"),
        (np.ones((1, 1)), RoutingTrace((np.array([[1]]),)), r"choice 0\] = 1: the model has experts 0 to 0"),
        (np.ones((1, 1)), RoutingTrace((np.array([[0]]),), None, (np.array([1]),)), r"topk_window\[layer 0, token 0\]"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(load, trace, message):
    with pytest.raises(ValueError, match=message):
        LoadFile(load, trace)
