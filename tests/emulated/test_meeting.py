"""Ranks that meet on their GPUs, without GPUs: the kernel compiled as C++ (tests/emulated)."""

import platform
import shutil

import pytest

from tests.emulated import cases_meeting
from tests.emulated.device import emulated_ranks

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None, reason="needs g++ on x86-64"
)


@pytest.mark.parametrize("num_ranks, size", [(1, 1), (2, 2), (3, 3), (4, 2), (4, 4), (7, 7), (7, 3)])
def test_what_each_wrote_before_is_there_behind_a_meeting(num_ranks, size):
    emulated_ranks(num_ranks, cases_meeting.many_meetings, size=size, num_meetings=100)


def test_epochs_that_begin_anew_after_weeks():
    emulated_ranks(3, cases_meeting.around_the_period)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_late_rank_is_named_at_the_deadline_and_not_waited_for_again(num_ranks):
    emulated_ranks(num_ranks, cases_meeting.late_rank)


def test_a_wait_is_told_while_it_lasts():
    emulated_ranks(3, cases_meeting.told_wait, shown={})


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_waits_for_a_lost_rank_end_at_once_and_the_others_go_on_and_later_it_too(num_ranks):
    emulated_ranks(num_ranks, cases_meeting.lost_rank)
