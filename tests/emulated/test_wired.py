"""Low latency between virtual nodes without a GPU: over a wire that is late and tears what it carries (wire.cpp)."""

import functools
import platform
import shutil

import pytest

from eprt.gpu import jit
from tests.emulated.cases import after_weeks, calls_low_latency, in_layers, late_rank
from tests.emulated.cases_lost import late_to_hand_on, lost_hander, masked_statistics
from tests.emulated.cases_told import masked_behind_a_copy_that_waits
from tests.emulated.device import emulated_ranks
from tests.gpu import (
    cases_low_latency,
    cases_low_latency_lost_ranks,
    cases_low_latency_signals,
    cases_nvshmem,
)

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None, reason="needs g++ on x86-64"
)

SHAPE = (256, 4, 4, 9, "fp8", False)


def test_four_ranks_on_two_nodes():
    emulated_ranks(4, calls_low_latency, ranks_per_node=2, shape=SHAPE, num_sms=2)


def test_every_output_by_itself_between_three_nodes():
    emulated_ranks(3, calls_low_latency, ranks_per_node=1, shape=(256, 2, 3, 7, "same", True), num_sms=1)


@pytest.mark.parametrize(
    "case, how",
    [
        (masked_statistics, {"shape": SHAPE, "mode": "low_latency"}),
        (masked_behind_a_copy_that_waits, {"mode": "low_latency"}),
        (after_weeks, {"shape": SHAPE, "mode": "low_latency", "num_calls": 2**32 - 2}),
        (cases_low_latency_signals.missing_signal, {"shape": SHAPE, "timeout_s": 1.5}),
    ],
)
def test_masks_deadlines_and_epochs_are_as_in_one_node(case, how):
    emulated_ranks(3, case, ranks_per_node=1, **how)


# Shapes with a row per expert are compared with the oracle of CPU ranks, which sums by node too.
@pytest.mark.parametrize(
    "num_ranks, ranks_per_node, shape",
    [
        (2, 1, (256, 2, 3, 7, "same", True)),
        (4, 2, SHAPE),
        (4, 2, (1008, 3, 2, 10, "fp8", True)),
        (6, 3, (256, 2, 2, 9, "same", False)),
        (8, 2, (256, 2, 3, 7, "fp8", True)),
        (4, 2, (384, 40, 10, 40, "fp8", True)),
    ],
)
def test_a_token_crosses_once_to_each_node(num_ranks, ranks_per_node, shape):
    emulated_ranks(num_ranks, in_layers, ranks_per_node, of=calls_low_latency, shape=shape, num_sms=2)


@pytest.mark.parametrize(
    "case, how",
    [
        (cases_nvshmem.crossings, {}),
        (cases_low_latency.two_in_flight, {}),
        (masked_statistics, {"shape": SHAPE, "mode": "low_latency"}),
        (after_weeks, {"shape": SHAPE, "mode": "low_latency", "num_calls": 2**32 - 2}),
        (cases_low_latency_signals.missing_signal, {"shape": SHAPE, "timeout_s": 4.0}),
        (cases_low_latency_lost_ranks.masked_before, {}),
        (late_rank, {"mode": "low_latency", "exact": True}),
        (late_to_hand_on, {"shape": SHAPE, "late_s": 1.0}),
        (lost_hander, {"shape": SHAPE}),
    ],
)
def test_in_layers_masks_lateness_and_losses(case, how):
    emulated_ranks(4, in_layers, 2, of=case, **how)


def test_one_rank_a_node_and_unequal_nodes():
    """Nodes of one rank hand on to nobody else; unequal ones are refused."""
    emulated_ranks(3, in_layers, 1, of=lost_hander, shape=SHAPE)
    with pytest.raises(ValueError, match="equally many ranks on each node"):
        emulated_ranks(7, in_layers, 2, of=calls_low_latency, shape=SHAPE, num_sms=1)


def test_who_does_not_await_the_word_finds_torn_rows(monkeypatch):
    """The emulated wire keeps no more than the contract: without its words results are wrong."""
    read, awaits = jit.read_source, "EPRT_WIRED(held.await_words(c, book, call.epoch, token, lane);)"
    assert awaits in read("low_latency_combine")
    monkeypatch.setattr(jit, "read_source", lambda name: read(name).replace(awaits, ""))
    # The other rank waits for the one that fails.
    soon = functools.partial(cases_low_latency.make_config, timeout_s=8.0)
    monkeypatch.setattr(cases_low_latency, "make_config", soon)
    with pytest.raises(AssertionError, match="y_TH"):
        emulated_ranks(2, calls_low_latency, ranks_per_node=1, shape=SHAPE, num_sms=2)
