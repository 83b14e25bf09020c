"""Who is late to a step is waited for; sleep is nobody's fault."""

import time

import numpy as np

from eprt.engine.step_waits import StepWaits

TOOK = [5_000, 2_000, 1_000, 9_000]


def test_who_arrives_later_is_waited_for():
    waits = StepWaits((0, 0, 0, 0), rank=1)
    assert max(waits.begin_exchange()) < 0, "there was no exchange yet"
    waits.end_exchange([-1] * 4, [-1] * 4, all_idle=False)
    time.sleep(0.002)
    arrived_ns, took_ns = waits.begin_exchange()
    assert took_ns >= 2e6 and 0 <= time.monotonic_ns() - arrived_ns < 10e9
    waits.end_exchange([105_000, 102_000, 101_000, 109_000], TOOK, all_idle=False)
    np.testing.assert_allclose(waits.wait_us_N, [3, 0, 0, 7])
    # Who was held up inside an exchange left it late and took less time from there: it did not wait for the others.
    waits.end_exchange([200_000] * 4, [90_000, 10_000, 90_000, 90_000], all_idle=False)
    np.testing.assert_allclose(waits.wait_us_N, [3, 0, 0, 7])
    assert waits.blocked_us == 7.0


def test_between_nodes_no_clocks_are_compared():
    waits = StepWaits((0, 0, 1, 1), rank=1)
    waits.end_exchange([0, 0, 10**15, 10**15], TOOK, all_idle=False)
    np.testing.assert_allclose(waits.wait_us_N, [0, 0, 0, 7])


def test_sleep_is_not_waited_for():
    waits = StepWaits((0, 0), rank=0)
    waits.end_exchange([1, 1], [1, 1], all_idle=True)
    assert max(waits.begin_exchange()) < 0
    waits.end_exchange([-1, 10**9], [-1, 10**9], all_idle=False)
    assert waits.begin_exchange()[1] >= 0 and not waits.wait_us_N.any()


def test_one_rank_waits_for_nobody_and_switched_off_nobody_does():
    alone = StepWaits((0,), rank=0)
    for _ in range(2):
        alone.end_exchange([7], [7], all_idle=False)
    assert alone.blocked_us == 0.0
    off = StepWaits((0, 0), rank=0)
    off.end_exchange([7, 7], [7, 7], all_idle=False)
    off.counting = False
    assert max(off.begin_exchange()) < 0
