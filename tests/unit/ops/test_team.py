"""The threads that kernels run on: every index once, whoever calls, however many threads there are.

In this process they are OpenMP's or our own team, as OMP_WAIT_POLICY was when it began; the last test tries the other.
"""

import os
import subprocess
import sys
import threading

import pytest
import torch

from eprt.ops import Weight, linear, native

native.load()


@pytest.fixture
def threads():
    """Sets torch's threads, which operators pass on, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def problem(rows: int) -> tuple[torch.Tensor, Weight, torch.Tensor]:
    """Small integers: every order of summation gives the same float32."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-4, 5, (rows, 96), generator=generator).float()
    w = torch.randint(-4, 5, (1500, 96), generator=generator).float()
    return x, Weight(w), x @ w.T


def test_more_threads_than_cores_and_than_pieces(threads):
    for count in (1, 2, 3, 7, 64, 1000):
        threads(count)
        for rows in (1, 5, 200):
            x, w, want = problem(rows)
            assert torch.equal(linear(x, w), want), f"{count} threads, {rows} rows"


def test_a_thread_that_comes_late_takes_nothing_of_the_next_loop(threads):
    """Loops follow each other faster than sleeping threads wake; their sizes differ."""
    problems = [problem(rows) for rows in (1, 33, 2, 17)]
    for count in (4, 2, 8):
        threads(count)
        for _ in range(30):
            for x, w, want in problems:
                assert torch.equal(linear(x, w), want)


def test_callers_at_the_same_time(threads):
    """One runs on the team, the others by themselves."""
    threads(4)
    x, w, want = problem(40)
    wrong = []

    def call() -> None:
        wrong.extend(i for i in range(60) if not torch.equal(linear(x, w), want))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not wrong and not any(caller.is_alive() for caller in callers)


def test_a_forked_child_has_a_team_of_its_own(threads):
    threads(3)
    x, w, want = problem(40)
    assert torch.equal(linear(x, w), want)
    if (child := os.fork()) == 0:  # torch's own operators would wait for threads of OpenMP that are not there
        os._exit(0 if (linear(x, w).numpy() == want.numpy()).all() else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_all_of_it_with_the_other_kind_of_threads():
    if "OMP_WAIT_POLICY_TRIED" in os.environ:
        pytest.skip("this is the other kind")
    passive = os.environ.get("OMP_WAIT_POLICY", "").lower().startswith("p")
    other = {"OMP_WAIT_POLICY": "active" if passive else "passive", "OMP_WAIT_POLICY_TRIED": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    tried = subprocess.run(command, env={**os.environ, **other}, capture_output=True, text=True, timeout=300)
    assert tried.returncode == 0, tried.stdout[-2000:]
