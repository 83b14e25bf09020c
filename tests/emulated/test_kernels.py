"""The CUDA kernels of the exchange without a GPU: compiled as C++, bit for bit against the oracle (tests/emulated)."""

import platform
import shutil

import pytest

from tests.emulated.cases import (
    after_weeks,
    calls_low_latency,
    calls_normal,
    late_rank,
    late_second_launch,
    late_while_setting_up,
    later_handle_first,
    layouts,
    long_wait,
    token_rows,
)
from tests.emulated.cases_lost import (
    back_after_weeks,
    lost_after_counts,
    lost_before_signals,
    lost_by_expert,
    masked_statistics,
)
from tests.emulated.cases_told import masked_behind_a_copy_that_waits, told_wait
from tests.emulated.cases_views import begins_alone, lost_amid_a_call
from tests.emulated.device import emulated_ranks
from tests.gpu import (
    cases_deep_ep_low_latency,
    cases_low_latency_signals,
    cases_normal_rows,
    cases_static_bound,
)

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None, reason="needs g++ on x86-64"
)


SHAPE = (256, 4, 4, 9, "fp8", False)


def test_low_latency_of_three_ranks_in_two_thread_blocks_each():
    emulated_ranks(3, calls_low_latency, shape=SHAPE, num_sms=2)


def test_one_deadline_ends_a_combine_however_many_tiles_never_come():
    emulated_ranks(3, cases_low_latency_signals.missing_signal, timeout_s=1.5, shape=SHAPE)


def test_deep_eps_interface_with_hooks_late_weights_and_every_output_by_itself(monkeypatch):
    monkeypatch.setattr(cases_deep_ep_low_latency, "SHAPES", [(512, 4, 4, 9)])
    emulated_ranks(2, cases_deep_ep_low_latency.shapes, seed=2, cases_per_shape=6)


def test_a_wait_longer_than_32_bits_of_ns_is_told_as_it_was():
    emulated_ranks(3, long_wait, shape=SHAPE)


@pytest.mark.parametrize("mode", ["low_latency", "normal"])
def test_a_kernel_tells_the_host_for_whom_it_waits_while_it_does(mode):
    emulated_ranks(3, told_wait, mode=mode, backends={})


@pytest.mark.parametrize("mode", ["low_latency", "normal"])
def test_a_mask_ends_a_wait_though_its_copy_to_the_gpu_must_wait_for_the_kernel(mode):
    emulated_ranks(3, masked_behind_a_copy_that_waits, mode=mode)


@pytest.mark.parametrize(
    "num_ranks, mode, exact",
    [
        (4, "low_latency", False),
        (4, "low_latency", True),
        (4, "normal", False),
        (4, "normal", True),
        (8, "low_latency", True),
        (8, "normal", False),
    ],
)
def test_a_late_rank_alone_is_charged_with_what_it_cost(num_ranks, mode, exact):
    emulated_ranks(num_ranks, late_rank, mode=mode, exact=exact)


@pytest.mark.parametrize("mode", ["low_latency", "normal"])
def test_a_rank_that_compiles_while_all_set_up_is_waited_for_and_a_late_one_in_service_is_not(mode):
    emulated_ranks(3, late_while_setting_up, mode=mode)


@pytest.mark.parametrize("num_calls", [2**31 + 5, 2**32 - 6, 2**32 - 2])
@pytest.mark.parametrize("mode", ["low_latency", "normal"])
def test_what_was_never_written_is_not_taken_for_new_after_weeks(mode, num_calls):
    emulated_ranks(3, after_weeks, shape=SHAPE, mode=mode, num_calls=num_calls)


def test_the_counts_of_deep_eps_get_dispatch_layout():
    emulated_ranks(3, layouts)


# Three thread blocks both send and receive, of five some send and others receive.
@pytest.mark.parametrize("num_ranks, num_sms, payload", [(2, 3, "fp8"), (3, 5, "same")])
def test_normal_mode_by_expert(num_ranks, num_sms, payload):
    emulated_ranks(num_ranks, calls_normal, shape=(256, 9, 4, 9, payload, False), num_sms=num_sms)


@pytest.mark.parametrize("num_sms", [1, 4])
def test_normal_mode_by_expert_receives_two_handles_in_either_order(num_sms):
    emulated_ranks(2, later_handle_first, shape=(16, 8, 2, 400, "same", False), num_sms=num_sms)


@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_lost_in_a_dispatch_by_expert_changes_no_others_outputs(fused):
    emulated_ranks(3, lost_by_expert, shape=(256, 9, 4, 9, "same", False), fused=fused, num_sms=5)


@pytest.mark.parametrize("exact", [False, True])
def test_normal_mode_by_expert_leaves_out_more_rows_than_a_static_bound(exact):
    emulated_ranks(2, cases_static_bound.too_many_rows, exact=exact)


def test_normal_mode_with_a_row_per_token(monkeypatch):
    monkeypatch.setattr(cases_normal_rows, "ROWS_NUM_SMS", [None, 1, 2])
    emulated_ranks(2, token_rows, shape=(1008, 9, 3, 20, "same", False), num_sms=3)


def test_normal_mode_with_a_row_per_token_leaves_out_more_than_a_static_bound():
    emulated_ranks(2, cases_static_bound.too_many_items)


def test_a_second_launch_that_comes_late_is_named_by_both_ends_and_epochs_stay_in_step():
    emulated_ranks(2, late_second_launch)


@pytest.mark.parametrize("mode", ["low_latency", "normal"])
def test_nothing_counts_as_sent_to_a_masked_rank(mode):
    emulated_ranks(3, masked_statistics, shape=SHAPE, mode=mode)


def test_experts_of_tokens_that_never_came_are_minus_one():
    emulated_ranks(2, lost_after_counts)


def test_a_rank_lost_in_dispatch_changes_no_others_outputs_that_are_sent_tile_by_tile():
    emulated_ranks(3, lost_before_signals, shape=SHAPE)


@pytest.mark.parametrize("mode", ["low_latency", "normal"])
def test_a_rank_that_missed_calls_comes_back_though_the_others_epochs_began_anew(mode):
    emulated_ranks(3, back_after_weeks, shape=SHAPE, mode=mode, num_calls=2**32 - 4)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("mode", ["low_latency", "normal"])
def test_ranks_go_on_without_one_that_is_lost_amid_a_call_and_later_with_it(mode, phase):
    emulated_ranks(3, lost_amid_a_call, shape=SHAPE, mode=mode, phase=phase)


@pytest.mark.parametrize("mode", ["low_latency", "normal"])
def test_a_rank_that_joins_begins_alone(mode):
    emulated_ranks(3, begins_alone, shape=SHAPE, mode=mode)
