"""The threads that kernels run on, OpenMP's or our own: every index once, whoever calls, however many there are."""

import os
import threading

import pytest
import torch

from eprt import env
from eprt.ops import Weight, linear, native

native.load()


@pytest.fixture(params=("OpenMP's", "our own"))
def threads(request):
    """Sets torch's threads, which operators pass on, for one test."""
    before = torch.get_num_threads()
    torch.ops.eprt.own_threads(request.param == "our own")
    yield torch.set_num_threads
    torch.set_num_threads(before)
    torch.ops.eprt.own_threads(env.openmp_sleeps())


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
