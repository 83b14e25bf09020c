"""The pool: numbered requests and wake-ups, full queues, ends of sequences, and ranks that are lost."""

import asyncio
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import pytest

from eprt.engine.outputs import TokenOutput
from eprt.engine.sampling_params import SamplingParams
from eprt.ep.migration.job import MigrationJob
from eprt.serve.diagnosis.hang_watch import HangWatch
from eprt.serve.errors import ApiError
from eprt.serve.flags import parse_options
from eprt.serve.options import FrontendConfig
from eprt.serve.ranks.connection import RankConnection
from eprt.serve.ranks.generation import Generation
from eprt.serve.ranks.messages import (
    AbortRequest,
    AddRequest,
    AskRouting,
    BrokenInvariant,
    Bye,
    Drain,
    EngineInfo,
    Fatal,
    Hello,
    Loading,
    Migrate,
    Ready,
    RoutingReply,
    StepReport,
    Stop,
    ToRank,
    Unpacker,
    Wake,
    pack,
)
from eprt.serve.ranks.pool import RankPool
from eprt.serve.ranks.rank import Rank
from eprt.serve.ranks.request_metrics import RequestMetrics
from tests.unit.cases import MODEL


def serving_pool(on_drain: Callable[[str, int], None] = lambda reason, rank: None, *flags: str) -> RankPool:
    """Of two ranks, which run two sequences and queue one, each."""
    options = parse_options(["--model", str(MODEL), "--max-num-seqs", "2", "--max-queue", "1", *flags])
    pool = RankPool(FrontendConfig(options, 2, "token", -1, -1, -1), RequestMetrics(options.tiers), on_drain)
    pool.ranks = {rank: Rank(rank, 100 + rank, "host", Mock()) for rank in range(2)}
    pool.set_state("serving", "")
    pool.ready.set()
    return pool


def sent(pool: RankPool, rank: int) -> list:
    """The messages that a rank was sent since the last look."""
    transport: Any = pool.ranks[rank].transport
    messages = Unpacker(ToRank).add_bytes(b"".join(call.args[0] for call in transport.write.call_args_list))
    transport.write.reset_mock()
    return messages


def report(pool: RankPool, rank: int, *outputs: TokenOutput) -> None:
    pool.on_message(pool.ranks[rank], StepReport(list(outputs)))


async def all_outputs(generation: Generation, count: int) -> list[tuple[int, TokenOutput]]:
    outputs: list[tuple[int, TokenOutput]] = []
    while len(outputs) < count:
        outputs += await generation.next_outputs()
    return outputs


def test_a_request_goes_to_one_rank_and_its_number_to_all():
    pool = serving_pool()
    pool.submit([([1, 2], SamplingParams(n=2, seed=5))])
    assert sent(pool, 0) == [AddRequest(1, "1", [1, 2], SamplingParams(n=2, seed=5), 0), Wake(2)]
    assert sent(pool, 1) == [AddRequest(2, "2", [1, 2], SamplingParams(n=2, seed=5), 1)]
    assert pool.num_sequences == 2 and not pool.quiet.is_set()


def test_requests_without_a_seed_get_one_from_the_servers():
    def seeds(*flags: str) -> list[int | None]:
        pool = serving_pool(lambda reason, rank: None, *flags)
        pool.submit([([1], SamplingParams()), ([2], SamplingParams())])
        return [
            message.params.seed for rank in range(2) for message in sent(pool, rank) if isinstance(message, AddRequest)
        ]

    first = seeds()
    assert None not in first and first[0] != first[1] and first == seeds() != seeds("--seed", "1")


def test_outputs_reach_their_generation_until_the_last():
    async def run() -> None:
        pool = serving_pool()
        generation = pool.submit([([1], SamplingParams(n=2))])
        report(pool, 1, TokenOutput("2", 7))
        report(pool, 0, TokenOutput("1", 8, finish_reason="stop"), TokenOutput("1", 9), TokenOutput("other", 9))
        assert [(index, output.token_id) for index, output in await all_outputs(generation, 2)] == [(1, 7), (0, 8)]
        assert pool.num_sequences == 1
        report(pool, 1, TokenOutput("2", 7, finish_reason="length"))
        assert pool.num_sequences == 0 and pool.quiet.is_set()

    asyncio.run(run())


def test_all_or_none_of_a_request_is_taken_and_full_ranks_refuse():
    pool = serving_pool()
    pool.submit([([1], SamplingParams(n=5))])
    for n in (2, 2):  # the second time with the room that the refused one gave back
        with pytest.raises(ApiError, match="the queue is full: 5 of at most 6 sequences") as caught:
            pool.submit([([1], SamplingParams(n=n))])
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "queue_full", 1)
    pool.submit([([1], SamplingParams())])
    assert pool.num_sequences == 6


@pytest.mark.parametrize("state, retry_after_s", [("loading", 5), ("draining", None), ("lost", None)])
def test_a_pool_that_does_not_serve_says_why(state, retry_after_s):
    pool = serving_pool()
    pool.set_state(state, "because")
    with pytest.raises(ApiError, match="no new requests: because") as caught:
        pool.submit([([1], SamplingParams())])
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, state, retry_after_s)


def test_an_abort_reaches_the_rank_that_runs_the_sequence_once():
    pool = serving_pool()
    generation = pool.submit([([1], SamplingParams(n=2))])
    sent(pool, 0), sent(pool, 1)
    generation.abort(1)
    generation.abort(1)
    assert sent(pool, 1) == [AbortRequest("2")] and sent(pool, 0) == [] and pool.num_sequences == 1


def test_sequences_that_do_not_finish_in_time_get_a_last_output():
    async def run() -> None:
        pool = serving_pool()
        generation = pool.submit([([1], SamplingParams(n=2))])
        assert pool.end_sequences() == 2 and pool.quiet.is_set()
        assert [output.finish_reason for _, output in await all_outputs(generation, 2)] == ["abort"] * 2

    asyncio.run(run())


def test_migrations_and_stops_are_numbered_for_all_ranks():
    pool = serving_pool()
    job = MigrationJob(1, 0, (), {}, (), timeout_s=1.0)
    pool.migrate(job)
    pool.stop()
    assert sent(pool, 0) == sent(pool, 1) == [Migrate(1, job), Stop(2)] and pool.state == "stopping"
    for rank in pool.ranks.values():
        assert not pool.ended.is_set()
        pool.on_message(rank, Bye())
    assert pool.ended.is_set() and pool.state == "stopping"
    pool.on_closed(pool.ranks[0], is_rank0=True)
    assert pool.state == "stopping", "a rank that has said Bye is not lost"


def test_routing_is_asked_of_every_rank_once_at_a_time():
    async def run() -> None:
        pool = serving_pool()
        asking = [asyncio.ensure_future(pool.ask_routing()) for _ in range(2)]
        await asyncio.sleep(0)
        assert sent(pool, 0) == sent(pool, 1) == [AskRouting()]
        replies = [RoutingReply((1, 1, 1), 1, bytes([rank]), b"") for rank in range(2)]
        for rank in (1, 0):
            pool.on_message(pool.ranks[rank], replies[rank])
        assert await asyncio.gather(*asking) == [replies, replies]
        with pytest.raises(TimeoutError):
            await pool.ask_routing(timeout_s=0)

    asyncio.run(run())


def test_a_rank_stalls_when_it_has_work_and_is_silent(monkeypatch):
    pool = serving_pool()
    pool.submit([([1], SamplingParams())])
    assert pool.stalled_ranks() == []
    later_s = time.monotonic() + pool.stall_s + 1
    monkeypatch.setattr("eprt.serve.ranks.pool.time.monotonic", lambda: later_s)
    assert pool.stalled_ranks() == [pool.ranks[0]], "rank 1 has no work"
    report(pool, 0)
    assert pool.stalled_ranks() == []


def test_ranks_that_loaded_for_long_are_not_taken_for_ranks_that_hang():
    """They say Hello before they load, and give heartbeats once they have."""
    pool = serving_pool()
    pool.set_state("loading", "the model is loading")
    pool.ready.clear()
    for rank in pool.ranks.values():
        rank.beat_s -= 600.0
    info = EngineInfo(640, 64, 640, (0, 0), 4, (1,), [[0, 1]])
    for rank in pool.ranks.values():
        pool.on_message(rank, Ready(info))
    assert pool.state == "serving" and pool.infos == [info, info]
    watch = HangWatch(10.0, 30.0)
    assert not watch.look(pool.members, 0) and watch.hangs == ()
    for rank in pool.members:
        rank.beat_s -= 40.0
    assert watch.look(pool.members, 0), "one that is stuck behind loading meets the deadline"
    assert [hang.culprit.rank for hang in watch.hangs] == [0, 1]


def test_what_ranks_have_read_is_told_while_they_load():
    pool = serving_pool()
    pool.set_state("loading", "the model is loading")
    pool.on_message(pool.ranks[0], Loading(3 * 10**9, 16 * 10**9))
    assert pool.reason == "the model is loading: 3.0 of 16.0 GB read"
    pool.on_message(pool.ranks[1], Loading(16 * 10**9, 16 * 10**9))
    assert pool.reason == "the model is loading: 19.0 of 32.0 GB read"
    with pytest.raises(ApiError, match="no new requests: the model is loading: 19"):
        pool.check_open()
    pool.set_state("serving", "")
    pool.on_message(pool.ranks[0], Loading(1, 2))
    assert pool.reason == "", "a rank that joins"


def test_broken_invariants_are_counted_and_logged(caplog):
    pool = serving_pool()
    pool.on_message(pool.ranks[1], BrokenInvariant("page 7 has no owner"))
    assert "rank 1 (pid 101, host host): page 7 has no owner" in caplog.text and pool.state == "serving"
    assert b"eprt_faults_total 1.0" in pool.metrics.text()


def test_a_loss_fails_every_generation_and_names_the_rank_that_is_to_blame(capfd):
    async def run() -> None:
        pool = serving_pool()
        generation = pool.submit([([1], SamplingParams())])
        pool.on_message(pool.ranks[0], Fatal("[rank 0/2] rank 1 died during dispatch\nmore", lost_rank=1))
        pool.on_closed(pool.ranks[0], is_rank0=True)  # only the first loss counts
        with pytest.raises(ApiError, match=r"rank 1 .* was lost: .* during dispatch; the request was lost") as caught:
            await generation.next_outputs()
        assert caught.value.code == "rank_lost" and pool.state == "lost" and pool.ended.is_set()
        assert pool.ranks[1].lost and not pool.ranks[0].lost and pool.num_sequences == 0

    asyncio.run(run())
    told = capfd.readouterr().err
    assert told.count("eprt: ") == 1 and "; 1 request ended with an error: [rank 0/2]" in told and "more" in told


def connection(pool: RankPool) -> tuple[RankConnection, Mock]:
    made, transport = RankConnection(pool), Mock()
    with patch("asyncio.get_running_loop"):  # its deadline
        made.connection_made(transport)
    return made, transport


def test_a_rank_is_known_by_its_hello():
    pool = serving_pool()
    pool.ranks = {}
    made, transport = connection(pool)
    data = pack(Hello("token", 1, 7, "host")) + pack(Drain("SIGTERM"))
    heard: list = []
    pool.on_drain = lambda reason, rank: heard.append((reason, rank))
    made.data_received(data[:9])
    made.data_received(data[9:])
    assert heard == [("SIGTERM", 1)] and pool.ranks[1].pid == 7 and not transport.abort.called


@pytest.mark.parametrize(
    "data",
    [
        pack(Hello("wrong", 1, 7, "host")),
        pack(Hello("token", 2, 7, "host")),
        pack(Hello("token", 0, 7, "host")),
        pack(Bye()),
        b"\x03\x00\x00\x00abc",
        b"\xff" * 5000,
    ],
    ids=["secret", "number", "taken", "no hello", "garbage", "endless"],
)
def test_strangers_are_refused(data):
    pool = serving_pool()
    del pool.ranks[1]
    made, transport = connection(pool)
    made.data_received(data)
    assert transport.abort.called and list(pool.ranks) == [0]
    made.connection_lost(None)
    assert pool.state == "serving", "a stranger that leaves is no loss"


def reason_of_loss(signal: str, fatal: str | None) -> str:
    """The reason of a server of two ranks that was told to drain by this signal and then lost rank 1."""

    async def drain_and_lose() -> str:
        pool = serving_pool(lambda reason, rank: pool.set_state("draining", reason))
        pool.on_message(pool.ranks[0], Drain(signal))
        if fatal is not None:
            pool.on_message(pool.ranks[1], Fatal(fatal))
        pool.on_closed(pool.ranks[1], is_rank0=False)
        assert pool.state == "lost" and pool.ended.is_set()
        return pool.reason

    return asyncio.run(drain_and_lose())


@pytest.mark.parametrize("signal", ["SIGUSR1", "mpirun (pid 7) is gone"])
def test_a_rank_lost_in_a_drain_is_named(signal, capfd):
    assert reason_of_loss(signal, None) == "rank 1 (pid 101, host host) was lost: its process is gone"
    assert reason_of_loss(signal, "a NaN") == "rank 1 (pid 101, host host) failed: a NaN"
    told = "eprt: rank 1 (pid 101, host host) failed; 0 requests ended with an error: a NaN"
    assert told in capfd.readouterr().err


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
def test_ranks_that_mpirun_kills_are_not_called_lost(signal):
    assert reason_of_loss(signal, None) == "the ranks were ended before running requests were done (use -n to drain)"


def counted(pool: RankPool, outcome: str) -> float | None:
    labels = {"tier": "max", "outcome": outcome}
    return pool.metrics.registry.get_sample_value("eprt_tier_requests_total", labels)


def test_requests_of_a_tier_are_counted_and_sent_away_where_they_would_be_late(monkeypatch):
    async def life() -> None:
        pool = serving_pool(lambda reason, rank: None, "--tier", "max=1,9", "--tier", "base=2,9")
        tier, forecast = pool._config.options.tiers[0], pool.forecast
        assert forecast is not None
        generation = pool.submit([([1] * 40, SamplingParams(max_tokens=2))], None, tier)
        assert generation.tier is tier and sum(forecast.backlog.num_tokens) == 40
        (request_id,) = generation.request_ids
        rank = forecast.backlog.num_tokens.index(40)
        on_output(pool, rank, TokenOutput(request_id, 5))
        assert sum(forecast.backlog.num_tokens) == 0 and forecast.backlog.tiers_there() == [0]
        on_output(pool, rank, TokenOutput(request_id, 6, finish_reason="length"))
        assert counted(pool, "met") == 1 and forecast.backlog.tiers_there() == []
        forecast.start("other", 0, tier, 10)
        forecast.start("another", 1, tier, 10)
        monkeypatch.setattr(forecast, "first_token_s", lambda rank, tier, num_tokens: 1.5)
        with pytest.raises(ApiError, match=r"tier max: the first token would come after 1.5 s") as caught:
            pool.submit([([1] * 40, SamplingParams())], None, tier)
        assert caught.value.code == "tier_busy" and counted(pool, "refused") == 1 and pool.num_sequences == 0
        pool.submit([([1] * 40, SamplingParams())], None, pool._config.options.tiers[1])
        forecast.end("other")
        forecast.end("another")
        pool.submit([([2] * 40, SamplingParams(n=2))], None, pool._config.options.tiers[1])
        pool.lose("rank 1", "was lost")
        assert counted(pool, "failed") == 0, "it was of another tier"
        labels = {"tier": "base", "outcome": "failed"}
        assert pool.metrics.registry.get_sample_value("eprt_tier_requests_total", labels) == 2

    asyncio.run(life())


def on_output(pool: RankPool, rank: int, output: TokenOutput) -> None:
    pool.on_message(pool.ranks[rank], StepReport([output], None))


def test_inside_a_group_a_tier_goes_where_least_is_ahead_of_it():
    """A long request of the last tier gives way; and each token is counted for its tier until its end."""
    pool = serving_pool(lambda reason, rank: None, "--tier", "max=1,9", "--tier", "base=2,9")
    first, last = pool._config.options.tiers
    pool.submit([([1] * 400, SamplingParams())], None, last)
    pool.submit([([2] * 30, SamplingParams())], None, first)
    assert pool.router.num_tokens == [400, 30]
    pool.submit([([3] * 20, SamplingParams())], None, first)
    assert pool.router.num_tokens == [420, 30] and [pool.router.tokens_ahead(r, 0) for r in range(2)] == [20, 30]
    report(pool, 0, TokenOutput("3", 7))
    assert pool.router.tokens_ahead(0, 0) == 21 and pool.router.tokens_ahead(0, 1) == 421
    report(pool, 0, TokenOutput("3", 7, finish_reason="stop"))
    assert pool.router.tokens_ahead(0, 0) == 0
