"""Who is late to a step is waited for; sleep is nobody's fault."""

import time

import numpy as np

from eprt.engine.step_waits import StepWaits


def test_the_difference_of_the_times_since_the_last_exchange_is_waited():
    waits = StepWaits(4, rank=1)
    assert waits.arrive() < 0, "there was no exchange yet"
    waits.leave([-1] * 4, all_idle=False)
    time.sleep(0.002)
    assert waits.arrive() >= 2e6
    waits.leave([5_000, 2_000, 1_000, 9_000], all_idle=False)
    waits.leave([2_000, 2_000, 3_000, 0], all_idle=False)
    np.testing.assert_allclose(waits.wait_us_N, [3, 0, 1, 7])
    assert waits.blocked_us == 8.0


def test_sleep_is_not_waited_for():
    waits = StepWaits(2, rank=0)
    waits.leave([1, 1], all_idle=True)
    assert waits.arrive() < 0
    waits.leave([-1, 10**9], all_idle=False)
    assert waits.arrive() >= 0 and not waits.wait_us_N.any()


def test_one_rank_waits_for_nobody_and_switched_off_nobody_does():
    alone = StepWaits(1, rank=0)
    alone.leave([7], all_idle=False)
    alone.leave([7], all_idle=False)
    assert alone.blocked_us == 0.0
    off = StepWaits(2, rank=0)
    off.leave([7, 7], all_idle=False)
    off.counting = False
    assert off.arrive() < 0
