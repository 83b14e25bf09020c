"""Elasticity: losses that are survived, processes that join, ranks that retire; and what is refused."""

import asyncio
import time
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from eprt.engine.outputs import TokenOutput
from eprt.engine.sampling_params import SamplingParams
from eprt.serve.errors import ApiError
from eprt.serve.flags import parse_options
from eprt.serve.options import FrontendConfig
from eprt.serve.ranks import messages as msg
from eprt.serve.ranks.pool import RankPool
from eprt.serve.ranks.rank import Rank
from eprt.serve.ranks.request_metrics import RequestMetrics
from tests.unit.cases import MODEL
from tests.unit.serve.ranks.test_pool import all_outputs, report, sent

PARAMS = SamplingParams(seed=5, max_tokens=9)


def info(rank: int, vocab_size: int = 9) -> msg.EngineInfo:
    """One MoE layer of four experts, each on two of three ranks."""
    held = [[0, 1, 2], [3, 0, 1], [2, 3, -1]][rank]
    return msg.EngineInfo(vocab_size, 64, 640, (0, 0, 0), 4, (1,), [held])


def elastic_pool(*flags: str) -> RankPool:
    """Of three ranks, of which two may be lost."""
    options = parse_options(["--model", str(MODEL), "-n", "3", "--max-lost-ranks", "2", *flags])
    pool = RankPool(FrontendConfig(options, 3, "token", -1, -1), RequestMetrics(), lambda reason, rank: None)
    pool.ranks = {rank: Rank(rank, 100 + rank, "host", Mock()) for rank in range(3)}
    for rank in range(3):
        pool.on_message(pool.ranks[rank], msg.Ready(info(rank)))
    assert pool.state == "serving"
    return pool


def lose(pool: RankPool, rank: int) -> None:
    pool.on_closed(pool.ranks[rank], is_rank0=False)


def enter_view(pool: RankPool) -> None:
    """The ranks do as they are told."""
    number, members = pool.roster.number, pool.members
    for rank in members:
        assert rank.info is not None
        pool.on_message(rank, msg.Suspended(number, rank.info.expert_of_slot, 0, 0))
    for rank in members:
        pool.on_message(rank, msg.Resumed(number))
    assert not pool.roster.changing


def join(pool: RankPool, rank: int) -> Rank | None:
    return pool.on_hello(msg.Hello("token", rank, 200 + rank, "host"), Mock())


def told(rank: Rank) -> list:
    transport: Any = rank.transport
    return msg.Unpacker(msg.ToRank).add_bytes(b"".join(call.args[0] for call in transport.write.call_args_list))


def states(pool: RankPool) -> list[str]:
    return [rank["state"] for rank in pool.elasticity.document()["ranks"]]


def test_a_lost_ranks_sequence_goes_on_elsewhere_behind_its_tokens(capfd):
    async def run() -> None:
        pool = elastic_pool()
        generation = pool.submit([([1, 2], PARAMS)])
        report(pool, 0, TokenOutput("1", 7), TokenOutput("1", 8))
        for rank in range(3):
            sent(pool, rank)
        lose(pool, 0)
        suspend, add = sent(pool, 1)
        assert suspend == msg.Suspend(1, [False, True, True])
        assert add == msg.AddRequest(2, "1", [1, 2], PARAMS, 0, [7, 8])
        assert sent(pool, 2) == [suspend, msg.Wake(2)]
        report(pool, 0, TokenOutput("1", 9))  # its last words
        enter_view(pool)
        assert sent(pool, 2)[-1] == msg.Go(1, 2)
        report(pool, 1, TokenOutput("1", 9, finish_reason="length"))
        outputs = [output.token_id for _, output in await all_outputs(generation, 3)]
        assert outputs == [7, 8, 9] and pool.num_sequences == 0 and pool.state == "serving"

    asyncio.run(run())
    assert "rank 0 (pid 100, host host) was lost: its process is gone; 1 sequence goes on" in capfd.readouterr().err


def test_new_requests_go_to_the_ranks_that_are_left():
    pool = elastic_pool()
    lose(pool, 0)
    pool.submit([([1], PARAMS)])
    assert [type(message) for message in sent(pool, 1)] == [msg.Suspend, msg.AddRequest]
    assert not [message for message in sent(pool, 0) if isinstance(message, msg.AddRequest)]


def test_two_losses_at_once_are_one_change_of_those_that_are_left():
    pool = elastic_pool()
    views: list = []
    pool.elasticity.on_view.append(views.append)
    lose(pool, 0)
    pool.on_message(pool.ranks[2], msg.Suspended(1, [[2, 3, -1]], 0, 0))
    lose(pool, 1)
    assert pool.roster.members == [2] and pool.roster.number == 2 and pool.state == "serving"
    pool.on_message(pool.ranks[2], msg.Suspended(2, [[2, 3, -1]], 0, 0))
    assert pool.state == "lost" and "1 rank of 3 slots per MoE layer hold 3 experts; the model has 4" in pool.reason
    assert views == []


def test_a_rank_that_hangs_is_killed_and_its_last_words_are_dropped(monkeypatch):
    pool = elastic_pool()
    killed: list = []
    monkeypatch.setattr(Rank, "kill", lambda rank: killed.append(rank.rank))
    pool.on_message(pool.ranks[0], msg.Lost(2, True, "waited 30 s for rank 2"))
    pool.on_message(pool.ranks[1], msg.Lost(2, True, "waited 30 s for rank 2"))
    assert killed == [2] and pool.roster.number == 1 and states(pool) == ["ready", "ready", "gone"]
    transport: Any = pool.ranks[2].transport
    assert transport.abort.called
    pool.on_message(pool.ranks[2], msg.Fatal("late", None))
    assert pool.state == "serving"


def test_a_rank_that_fails_by_itself_is_survived(capfd):
    pool = elastic_pool()
    pool.on_message(pool.ranks[1], msg.Fatal("a NaN"))
    enter_view(pool)
    assert states(pool) == ["ready", "gone", "ready"] and "(pid 101, host host) failed: a NaN" in capfd.readouterr().err


def test_without_the_flag_the_first_loss_ends_the_server():
    options = parse_options(["--model", str(MODEL)])
    pool = RankPool(FrontendConfig(options, 3, "token", -1, -1), RequestMetrics(), lambda reason, rank: None)
    pool.ranks = {rank: Rank(rank, 100 + rank, "host", Mock()) for rank in range(3)}
    for rank in range(3):
        pool.on_message(pool.ranks[rank], msg.Ready(info(rank)))
    lose(pool, 1)
    assert pool.state == "lost"


def test_a_process_joins_loads_and_enters_between_two_steps():
    pool = elastic_pool()
    lose(pool, 1)
    rank = join(pool, 1)
    assert rank is not None and told(rank) == [], "not before the others have left the last view"
    enter_view(pool)
    assert told(rank) == [msg.Admit()] and states(pool)[1] == "warming"
    pool.submit([([1], PARAMS)])
    assert told(rank) == [msg.Admit()], "it gets nothing yet"
    for other in (0, 2):
        sent(pool, other)
    pool.on_message(rank, msg.Ready(info(1)))
    assert pool.ranks[1] is rank and told(rank)[1:] == [msg.Suspend(2, [True] * 3)]
    assert sent(pool, 0) == sent(pool, 2) == [msg.Suspend(2, [True] * 3, 2)]
    enter_view(pool)
    assert states(pool) == ["ready"] * 3 and pool.roster.is_whole and pool.router.is_open == [True] * 3


@pytest.mark.parametrize(
    "rank, flags, why",
    [
        (1, (), r"slot 1 is taken: rank 1 \(pid 101, host host\) is ready"),
        (0, ("gone", "twice"), r"rank 0 \(pid 200, host host\) is about to take this slot"),
        (0, ("gone", "draining"), "the server is draining"),
    ],
)
def test_a_process_that_cannot_join_is_told_why_and_nothing_changes(rank, flags, why):
    pool = elastic_pool()
    if "gone" in flags:
        lose(pool, rank)
        enter_view(pool)
    if "twice" in flags:
        join(pool, rank)
    if "draining" in flags:
        pool.set_state("draining", "")
    before, transport = states(pool), Mock()
    assert pool.on_hello(msg.Hello("token", rank, 300, "host"), transport) is None
    (refused,) = msg.Unpacker(msg.ToRank).add_bytes(transport.write.call_args.args[0])
    assert isinstance(refused, msg.Refused) and transport.close.called and states(pool) == before
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(refused.message)


def test_a_process_with_another_model_is_refused():
    pool = elastic_pool()
    lose(pool, 1)
    enter_view(pool)
    rank = join(pool, 1)
    assert rank is not None
    pool.on_message(rank, msg.Ready(info(1, vocab_size=10)))
    refused = told(rank)[-1]
    assert refused.message == "another model or other flags: its vocab_size is 10, that of the others 9"
    assert states(pool)[1] == "gone" and pool.roster.members == [0, 2]
    assert join(pool, 1) is not None, "the slot is free again"


def test_a_process_that_dies_while_it_loads_costs_nothing():
    pool = elastic_pool()
    lose(pool, 1)
    enter_view(pool)
    rank, number = join(pool, 1), pool.roster.number
    assert rank is not None
    pool.on_closed(rank, is_rank0=False)
    assert states(pool)[1] == "gone" and pool.roster.number == number and pool.state == "serving"


def test_a_rank_retires_once_its_requests_have_ended():
    async def run() -> None:
        pool = elastic_pool()
        pool.submit([([1], PARAMS)])
        assert pool.elasticity.retire(0)["ranks"][0]["state"] == "retiring"
        pool.submit([([1], PARAMS)])
        assert not [m for m in sent(pool, 0) if isinstance(m, msg.AddRequest) and m.request_id == "2"]
        await asyncio.sleep(0)
        assert not pool.roster.changing, "it has a request"
        report(pool, 0, TokenOutput("1", 7, finish_reason="stop"))
        while not pool.roster.changing:
            await asyncio.sleep(0.01)
        assert sent(pool, 0) == [msg.Suspend(1, [False, True, True], 3)]
        pool.on_message(pool.ranks[0], msg.Bye())
        pool.on_closed(pool.ranks[0], is_rank0=False)
        enter_view(pool)
        assert states(pool) == ["gone", "ready", "ready"] and not pool.ended.is_set()
        assert pool.roster.num_lost == 0

    asyncio.run(run())


def test_requests_of_a_retiring_rank_move_when_its_time_is_up():
    async def run() -> None:
        pool = elastic_pool("--drain-timeout", "0")
        pool.submit([([1], PARAMS)])
        report(pool, 0, TokenOutput("1", 7))
        sent(pool, 1)
        pool.elasticity.retire(0)
        while not pool.roster.changing:
            await asyncio.sleep(0)
        assert sent(pool, 1)[1:] == [msg.AddRequest(3, "1", [1], PARAMS, 0, [7])]
        report(pool, 0, TokenOutput("1", 8))  # of the step in flight: the other rank computes it again
        assert pool.sequences.num_on(1) == 1 and pool.sequences.num_moved == 1

    asyncio.run(run())


async def begin_to_leave(pool: RankPool, rank: int) -> None:
    """The rank has no request, and all are told to stop after a common step."""
    pool.elasticity.retire(rank)
    while not pool.roster.changing:
        await asyncio.sleep(0)
    for other in range(3):
        sent(pool, other)


def test_a_leaving_rank_that_dies_before_the_common_step_is_waited_for_no_more():
    async def run() -> None:
        pool = elastic_pool()
        await begin_to_leave(pool, 0)
        lose(pool, 0)
        assert sent(pool, 1) == sent(pool, 2) == [msg.Suspend(2, [False, True, True])]
        enter_view(pool)
        assert states(pool) == ["gone", "ready", "ready"] and pool.state == "serving"

    asyncio.run(run())


def test_a_leaving_rank_is_told_again_when_another_is_lost():
    async def run() -> None:
        pool = elastic_pool()
        await begin_to_leave(pool, 2)
        lose(pool, 0)
        assert sent(pool, 2) == [msg.Suspend(2, [False, True, False])]

    asyncio.run(run())


def test_a_rank_that_is_needed_after_a_loss_does_not_leave():
    async def run() -> None:
        pool = elastic_pool()
        pool.submit([([1], PARAMS), ([1], PARAMS)])
        pool.elasticity.retire(1)
        lose(pool, 0)
        enter_view(pool)
        for request_id in ("1", "2"):
            for rank in (1, 2):
                report(pool, rank, TokenOutput(request_id, 7, finish_reason="stop"))
        while states(pool)[1] == "retiring":
            await asyncio.sleep(0.01)
        assert states(pool) == ["gone", "ready", "ready"] and not pool.roster.changing
        assert pool.router.is_open == [False, True, True]

    asyncio.run(run())


@pytest.mark.parametrize("number, lost, code", [(7, (), "not_found"), (1, (1,), "not_ready"), (1, (0,), "capacity")])
def test_a_retirement_that_cannot_be_is_refused(number, lost, code):
    pool = elastic_pool()
    for rank in lost:
        lose(pool, rank)
        enter_view(pool)
    before = states(pool)
    with pytest.raises(ApiError) as caught:
        pool.elasticity.retire(number)
    assert caught.value.code == code and states(pool) == before
    if code == "capacity":
        assert "1 rank of 3 slots per MoE layer hold 3 experts; the model has 4" in caught.value.message


@pytest.mark.parametrize("resumes", [False, True])
def test_a_rank_that_does_not_answer_amid_a_change_is_given_up(monkeypatch, resumes):
    async def run() -> None:
        pool = elastic_pool()
        monkeypatch.setattr("eprt.serve.ranks.elasticity._LOOK_S", 0)
        pool.elasticity._answer_s = 0.0
        lose(pool, 0)
        for rank in (1, 2) if resumes else (1,):
            pool.on_message(pool.ranks[rank], msg.Suspended(1, [[0, 1, 2]], 0, 0))
        if resumes:
            pool.on_message(pool.ranks[1], msg.Resumed(1))
        watching = asyncio.ensure_future(pool.elasticity.watch_processes())
        while pool.roster.number == 1:
            await asyncio.sleep(0)
        watching.cancel()
        assert states(pool) == ["gone", "ready", "gone"] and pool.roster.members == [1]

    asyncio.run(run())


def test_a_killed_rank_is_noticed_before_its_socket_closes(monkeypatch):
    async def run() -> None:
        pool = elastic_pool()
        monkeypatch.setattr("eprt.serve.ranks.elasticity._LIFE_LOOK_S", 0)
        board: Any = Mock()
        board.died.return_value = np.array([False, False, True])
        watching = asyncio.ensure_future(pool.elasticity.watch_lives(board))
        while states(pool)[2] != "gone":
            await asyncio.sleep(0)
        enter_view(pool)
        pool.on_closed(pool.ranks[2], is_rank0=False)  # later, its socket
        rank = join(pool, 2)  # before it holds its lock
        for _ in range(3):
            await asyncio.sleep(0)
        watching.cancel()
        assert rank is not None and states(pool)[2] == "warming"
        assert pool.roster.num_lost == pool.roster.number == 1

    asyncio.run(run())


def test_stopped_processes_are_noticed(monkeypatch):
    async def run() -> None:
        pool = elastic_pool()
        monkeypatch.setattr("eprt.serve.ranks.elasticity._LOOK_S", 0)
        monkeypatch.setattr(Rank, "is_stopped", property(lambda rank: rank.rank == 2))
        watching = asyncio.ensure_future(pool.elasticity.watch_processes())
        while states(pool)[2] != "gone":
            await asyncio.sleep(0)
        watching.cancel()
        assert states(pool) == ["ready", "ready", "gone"] and pool.roster.number == 1

    asyncio.run(run())


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def tell_to_stop(pool: RankPool, *ranks: int) -> list:
    """SIGTERM to the processes of these ranks; returns whom on_drain is called with from now on."""
    told: list = []
    pool.on_drain = lambda reason, rank: told.append(rank)
    for rank in ranks:
        pool.on_message(pool.ranks[rank], msg.Drain("SIGTERM"))
    return told


def test_a_signal_to_one_rank_retires_it_and_a_second_one_hurries_it(monkeypatch):
    async def run() -> None:
        monkeypatch.setattr("eprt.serve.ranks.elasticity._TOLD_S", 0)
        pool = elastic_pool()
        pool.submit([([1], PARAMS)])
        told = tell_to_stop(pool, 0)
        await until(lambda: states(pool)[0] == "retiring")
        await asyncio.sleep(0)
        assert not pool.roster.changing, "it has a request"
        pool.on_message(pool.ranks[0], msg.Drain("SIGTERM"))
        await until(lambda: pool.roster.changing)
        assert told == [] and pool.state == "serving" and pool.sequences.num_on(0) == 0

    asyncio.run(run())


def test_signals_to_ranks_that_the_server_needs_stop_it():
    async def run() -> None:
        pool = elastic_pool()
        lose(pool, 2)
        enter_view(pool)
        told = tell_to_stop(pool, 0)
        assert told == []
        await until(lambda: told)
        assert told == [0] and states(pool)[:2] == ["ready", "ready"]

    asyncio.run(run())


def test_a_signal_to_all_processes_is_one_to_the_server():
    async def run() -> None:
        pool = elastic_pool()
        told = tell_to_stop(pool, 0, 1)
        pool.set_state("draining", "")  # the frontend has got it, too
        tell_to_stop(pool)
        await asyncio.sleep(0.5)
        assert told == [] and states(pool) == ["ready"] * 3

    asyncio.run(run())


def test_a_launcher_that_is_gone_and_a_process_that_takes_no_part():
    pool = elastic_pool()
    lose(pool, 1)
    enter_view(pool)
    rank = join(pool, 1)
    assert rank is not None
    told = tell_to_stop(pool)
    pool.on_message(rank, msg.Drain("SIGTERM"))  # it ends by itself
    assert told == []
    pool.on_message(pool.ranks[0], msg.Drain("the launcher (pid 7) is gone"))
    assert told == [0]


def test_a_rank_that_is_about_to_leave_may_be_told_so_again():
    async def run() -> None:
        pool = elastic_pool()
        pool.submit([([1], PARAMS)])
        assert pool.elasticity.retire(0)["ranks"] == pool.elasticity.retire(0)["ranks"]
        assert states(pool)[0] == "retiring"

    asyncio.run(run())


def test_a_rank_that_hangs_in_a_step_is_given_up(monkeypatch, capfd):
    async def run() -> None:
        pool = elastic_pool()
        monkeypatch.setattr("eprt.serve.ranks.elasticity._LOOK_S", 0)
        judge = pool.elasticity._judge
        monkeypatch.setattr(judge, "look", lambda ranks, quiet_s: [(pool.ranks[1], "it sleeps")])
        watching = asyncio.ensure_future(pool.elasticity.watch_processes())
        await until(lambda: states(pool)[1] == "gone")
        watching.cancel()
        assert pool.roster.members == [0, 2] and pool.elasticity.hung_ranks() == [], "amid a change nobody is judged"

    asyncio.run(run())
    assert "rank 1 (pid 101, host host) hangs, and is killed: it sleeps" in capfd.readouterr().err


def test_a_rank_that_is_quiet_is_asked_once_for_a_sign_of_life(monkeypatch):
    pool = elastic_pool()
    pool.submit([([1], PARAMS)])
    for rank in range(3):
        sent(pool, rank)
    now_s = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    for after_s, asked in ((0.0, []), (0.6, [msg.Ping()]), (0.8, [])):
        now_s += after_s
        pool.elasticity.hung_ranks()
        assert [sent(pool, rank) for rank in range(3)] == [asked, [], []]
    pool.on_message(pool.ranks[0], msg.Pong())
    assert pool.quiet_s == {0: 0.0}
