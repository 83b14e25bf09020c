"""Ranks that get stuck before they are Ready: who is given up, when, and in which words."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from eprt.serve.ranks import messages as msg
from eprt.serve.ranks.rank import Rank
from tests.unit.serve.instances import cases
from tests.unit.serve.instances.cases import GivenFleet
from tests.unit.serve.ranks.test_elasticity import elastic_pool, enter_view, info, join, lose, states
from tests.unit.serve.ranks.test_pool import serving_pool

GB = 10**9


@pytest.fixture
def clock(monkeypatch) -> Callable[[float], None]:
    """A function that lets seconds pass."""
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)

    init = Rank.__init__

    def begin(rank: Rank, *args: Any, **fields: Any) -> None:
        init(rank, *args, **fields)
        rank.beat_s = rank.heard_s = rank.progress_s = now_s

    monkeypatch.setattr(Rank, "__init__", begin)

    def pass_(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    return pass_


def loading_pool(num_there: int = 2) -> Any:
    """Of two ranks, of which the first num_there have connected."""
    pool = serving_pool(lambda reason, rank: None, "--load-timeout", "600")
    pool.ready.clear()
    pool.set_state("loading", "the model is loading")
    pool.ranks = {}
    for rank in range(num_there):
        pool.on_hello(msg.Hello("token", rank, 100 + rank, "elsewhere"), Mock())
    return pool


def let_pass(pool, clock, seconds: float, each: Callable[[float], None] = lambda at_s: None) -> None:
    """each(at_s): what the ranks say, every second."""
    for at_s in range(int(seconds)):
        each(at_s)
        pool.look_at_loading()
        clock(1.0)
    pool.look_at_loading()


def test_a_stuck_rank_ends_the_start_and_waiter_peer_and_phase_are_named(clock):
    pool = loading_pool()

    def say(at_s: float) -> None:
        pool.on_message(pool.ranks[0], msg.Heartbeat(False, 0.0, 1, "set-up call 7 (window)", at_s))
        pool.on_message(pool.ranks[1], msg.Heartbeat(False, 0.0))

    pool.on_message(pool.ranks[1], msg.Loading(GB, 4 * GB))
    let_pass(pool, clock, 599, say)
    assert pool.state == "loading"
    let_pass(pool, clock, 3, say)
    assert pool.state == "lost" and pool.ended.is_set()
    assert pool.reason.startswith("rank 1 (pid 101, host elsewhere) was not ready with 1.0 of 4.0 GB read, and no rank")
    assert "got any further for 600 s (--load-timeout): rank 1 does not go on" in pool.reason
    assert "rank 0 waits for it for" in pool.reason and "in set-up call 7 (window)" in pool.reason


def test_slow_loads_go_on_as_long_as_one_rank_reads_computes_or_gets_to_another_wait(clock):
    """A byte in nearly 600 s; then a core is used now and then; then a wait begins."""
    pool = loading_pool()

    def read(at_s: float) -> None:
        if at_s % 590 == 0:
            pool.on_message(pool.ranks[1], msg.Loading(int(at_s), 10**12))

    let_pass(pool, clock, 3000, read)

    def compute(at_s: float) -> None:
        pool.on_message(pool.ranks[1], msg.Heartbeat(False, 0.9 * (at_s // 500)))

    let_pass(pool, clock, 3000, compute)
    for call in range(3):
        let_pass(
            pool, clock, 500, lambda _, c=call: pool.on_message(pool.ranks[1], msg.Heartbeat(False, 0.0, 0, f"{c}"))
        )
    assert pool.state == "loading"
    for rank in range(2):
        pool.on_message(pool.ranks[rank], msg.Ready(info(rank)))
    let_pass(pool, clock, 2000)
    assert pool.state == "serving", "nobody loads any more"


def test_a_rank_whose_wait_spins_gets_no_further(clock):
    pool = loading_pool()

    def say(at_s: float) -> None:
        pool.on_message(pool.ranks[0], msg.Heartbeat(False, at_s, 1, "set-up", at_s))

    let_pass(pool, clock, 602, say)
    assert pool.state == "lost" and pool.reason.startswith("rank 1 (pid 101")
    assert "has given no heartbeat for" in pool.reason


def test_a_rank_that_never_connects_is_named(clock):
    pool = loading_pool(num_there=1)
    let_pass(
        pool, clock, 602, lambda at_s: pool.on_message(pool.ranks[0], msg.Heartbeat(False, 0.0, 1, "set-up", at_s))
    )
    assert pool.state == "lost"
    assert pool.reason.startswith("rank 1 was not ready, and no rank got any further for 600 s")
    assert "it has never connected; rank 0 waits for rank 1 for" in pool.reason and "in set-up" in pool.reason


def test_a_stuck_joiner_is_killed_and_the_others_serve_on(clock, monkeypatch, capfd):
    pool = elastic_pool("--load-timeout", "600")
    lose(pool, 2)
    enter_view(pool)
    joiner = join(pool, 2)
    assert joiner is not None and states(pool)[2] == "warming"
    killed: list[int] = []
    monkeypatch.setattr(Rank, "kill", lambda rank: killed.append(rank.pid))
    let_pass(pool, clock, 599)
    assert not killed
    let_pass(pool, clock, 3)
    assert set(killed) == {202} and states(pool) == ["ready", "ready", "gone"] and pool.state == "serving"
    assert "rank 2 (pid 202, host host), about to take part, was not ready, and no rank" in capfd.readouterr().err
    assert join(pool, 2) is not None, "the slot is free again"


def test_a_joiner_is_not_blamed_for_the_time_before_it_may_load(clock):
    pool = elastic_pool("--load-timeout", "600")
    lose(pool, 2)
    assert join(pool, 2) is not None and states(pool)[2] == "gone", "a change is under way"
    let_pass(pool, clock, 1000)
    enter_view(pool)
    assert states(pool)[2] == "warming"
    let_pass(pool, clock, 599)
    assert states(pool)[2] == "warming"


def test_an_instance_that_gets_stuck_at_the_start_ends_it(clock):
    fleet = GivenFleet("--prefill", "1", "--decode", "1", loads=False)
    pool = fleet.instances["decode-0"].pool
    for one in fleet.instances.values():
        if one.pool is not pool:
            fleet.on_message(fleet.given[str(one)], msg.Ready(cases.info("p")))
    lost: list[str] = []
    pool.lose = lambda who, what, details="": lost.append(f"{who} {what}: {details}")  # type: ignore[method-assign]
    let_pass(pool, clock, 602)
    assert lost and "was not ready" in lost[0]


def test_nothing_is_given_up_after_a_time_in_which_this_process_stood_still(clock):
    pool = loading_pool()
    let_pass(pool, clock, 10)
    clock(5000)
    pool.look_at_loading()
    for rank in range(2):  # what waited in the sockets
        pool.on_message(pool.ranks[rank], msg.Loading(1, 2))
    let_pass(pool, clock, 10)
    assert pool.state == "loading"
