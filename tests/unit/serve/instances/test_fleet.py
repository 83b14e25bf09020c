"""The fleet: who is let in, who gets a request, and how it ends."""

import asyncio
from collections.abc import Callable, Coroutine

import msgspec
import pytest

from eprt.engine.outputs import EngineStats, TokenOutput
from eprt.engine.sampling_params import SamplingParams
from eprt.serve.errors import ApiError
from eprt.serve.instances.document import instances_document
from eprt.serve.instances.far_joins import FarJoinRequest
from eprt.serve.instances.metrics import InstanceCollector
from eprt.serve.ranks import messages as msg
from tests.unit.serve.instances.cases import TERMS, GivenFleet, info

PARAMS = SamplingParams(seed=1, max_tokens=8)


def run(life: Callable[[GivenFleet], Coroutine], *flags: str, loads: bool = True) -> None:
    async def go() -> None:
        await life(GivenFleet(*(flags or ("--prefill", "1", "--decode", "1")), loads=loads))

    asyncio.run(go())


def where(fleet: GivenFleet, prompt: list[int]) -> str:
    (request_id,) = fleet.submit([(prompt, PARAMS)]).request_ids
    (name,) = [name for name, one in fleet.instances.items() if one.pool.sequences.find(request_id)]
    return name


async def sent_until_stop(fleet: GivenFleet, name: str) -> list:
    """What the instance is sent from now on, until it is told to stop."""
    sent = fleet.sent(name)
    for _ in range(10_000):
        if any(isinstance(one, msg.Stop) for one in sent):
            break
        await asyncio.sleep(0.01)
        sent += fleet.sent(name)
    return sent


def test_it_serves_once_all_instances_of_the_start_have_loaded():
    async def life(fleet: GivenFleet) -> None:
        assert fleet.state == "loading"
        assert list(fleet.instances) == ["prefill-0", "decode-0"], "in the order of the flags"
        fleet.on_message(fleet.given["prefill-0"], msg.Ready(info("a", kv_tokens=64)))
        assert fleet.state == "loading" and fleet.limits is None
        fleet.on_message(fleet.given["decode-0"], msg.Ready(info("b")))
        assert fleet.state == "serving" and fleet.limits is not None
        assert fleet.limits.kv_tokens == 64, "a request must fit everywhere"

    run(life, loads=False)


def test_while_it_loads_its_reason_tells_what_was_read_and_who_is_awaited():
    async def life(fleet: GivenFleet) -> None:
        assert fleet.reason == "the model is loading"
        for name, num_gb in (("prefill-0", 1), ("decode-0", 3)):
            fleet.on_message(fleet.given[name], msg.Loading(num_gb * 10**9, 4 * 10**9))
        assert fleet.reason == "the model is loading: 4.0 of 8.0 GB read"
        with pytest.raises(ApiError, match=r"no new requests: the model is loading: 4[.]0 of 8[.]0 GB"):
            fleet.submit([([1], PARAMS)])
        fleet.on_message(fleet.given["decode-0"], msg.Ready(info("b")))
        assert fleet.reason == "the model is loading: 4.0 of 8.0 GB read; ready: decode-0; awaited: prefill-0"
        fleet.on_message(fleet.given["prefill-0"], msg.Ready(info("a")))
        assert (fleet.state, fleet.reason) == ("serving", "")
        fleet.on_message(fleet.given["prefill-0"], msg.Loading(1, 1))
        assert fleet.reason == "", "a successor's loading is of no interest here"

    run(life, loads=False)


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("model", "other", "its model is other, that of the others model"),
        ("page_size", 64, "its page size is 64, that of the others 16"),
        ("cache_format", "fp8", "its cache format is fp8"),
        ("drafts", 2, "its drafts is 2, that of the others 0"),
    ],
)
def test_an_instance_that_is_not_like_the_others_is_refused_by_name(capsys, field, value, words):
    async def life(fleet: GivenFleet) -> None:
        fleet.lose_instance("decode-0")
        terms = msgspec.structs.replace(TERMS, **{field: value})
        fleet.connect("decode-0", "decode", "2", terms=terms)
        assert fleet.instances["decode-0"].state == "lost" and fleet.state == "serving"

    run(life)
    assert words in capsys.readouterr().err


def test_a_successor_takes_the_name_of_a_lost_instance_and_nobody_else():
    async def life(fleet: GivenFleet) -> None:
        assert fleet.connect("decode-0", "decode", "2") is None, "it is there"
        assert fleet.connect("decode-7", "chief", "1") is None, "nobody knows its role"
        fleet.lose_instance("decode-0")
        assert fleet.connect("decode-0", "decode", "1") is None, "of the lost incarnation"
        assert fleet.connect("decode-0", "decode", "2") is not None
        assert fleet.instances["decode-0"].state == "ready" and len(fleet.living) == 2

    run(life)


def test_short_rests_of_prompts_are_computed_by_the_decode_instance():
    async def life(fleet: GivenFleet) -> None:
        assert where(fleet, list(range(30))) == "prefill-0"
        assert where(fleet, list(range(18))) == "decode-0"
        assert where(fleet, list(range(30))) == "decode-0", "it has the first page"

    run(life, "--prefill", "1", "--decode", "1", "--local-prefill-tokens", "20", "--max-num-seqs", "9")


def test_prompts_go_where_they_are_computed_first():
    async def life(fleet: GivenFleet) -> None:
        fleet.instances["prefill-1"].rate.tokens_per_s = 4000.0  # four times as fast
        went = [where(fleet, [i] * 100) for i in range(5)]
        assert went.count("prefill-1") == 4 and went[0] == "prefill-1"

    run(life, "--prefill", "2", "--decode", "1", "--max-num-seqs", "9")


@pytest.mark.parametrize("balance, chosen", [("kv", "decode-1"), ("batch", "decode-0"), ("step", "decode-1")])
def test_decodes_are_balanced_as_asked(balance, chosen):
    """decode-0 has one sequence of many tokens, decode-1 two of few."""

    async def life(fleet: GivenFleet) -> None:
        for name, prompts in (("decode-0", [[1] * 400]), ("decode-1", [[2] * 9, [3] * 9])):
            pool = fleet.instances[name].pool
            for i, prompt in enumerate(prompts):
                pool.router.assign(f"{name} {i}", prompt)
        for one in fleet.living:
            for rows, tokens in ((1, 10), (1, 500), (3, 10), (3, 500)):
                one.steps.add_step(rows, tokens, 0.001 + 1e-5 * rows + 1e-4 * tokens)
        instance = fleet.chooser.choose_decode([7] * 20)
        assert instance is not None and str(instance) == chosen

    run(life, "--prefill", "1", "--decode", "2", "--decode-balance", balance, "--max-num-seqs", "9")


def test_a_decode_instance_without_room_is_passed_over():
    async def life(fleet: GivenFleet) -> None:
        fleet.instances["decode-0"].pool.router.assign("large", [1] * 1000)
        assert {str(fleet.chooser.choose_decode([7] * 30)) for _ in range(8)} == {"decode-1"}
        fleet.instances["decode-1"].pool.router.assign("large", [1] * 1000)
        assert fleet.chooser.choose_decode([7] * 30) is not None, "it waits there"

    run(life, "--prefill", "1", "--decode", "2", "--decode-balance", "batch")


def test_a_request_is_taken_as_a_whole_or_refused():
    async def life(fleet: GivenFleet) -> None:
        params = SamplingParams(n=3, seed=1)
        with pytest.raises(ApiError, match="the queue is full"):
            fleet.submit([([1], params), ([2], params)])
        assert fleet.num_sequences == 0 and fleet.sent("prefill-0") == []
        assert len(fleet.submit([([1], params)]).request_ids) == 3

    run(life)


def test_stopping_tells_all_and_ends_when_all_have_left():
    async def life(fleet: GivenFleet) -> None:
        fleet.submit([([1], PARAMS)])
        assert fleet.end_sequences() == 1 and fleet.num_sequences == 0
        fleet.stop()
        for name in ("prefill-0", "decode-0"):
            assert isinstance(fleet.sent(name)[-1], msg.Stop)
            assert not fleet.ended.is_set()
            fleet.on_message(fleet.given[name], msg.Bye())
            fleet.on_closed(fleet.given[name], False)
        assert fleet.ended.is_set() and fleet.state == "stopping"

    run(life)


def test_figures_name_each_instance_and_number_ranks_over_all():
    async def life(fleet: GivenFleet) -> None:
        fleet.submit([(list(range(20)), PARAMS)])
        stats = EngineStats(0, 1, 20, 1, 0, 0, 2, 0, 64, 3, 0.02, num_held_now=1)
        fleet.report("decode-0", stats=stats)
        document = instances_document(fleet)
        assert [(one["name"], one["state"]) for one in document["instances"]] == [
            ("prefill-0", "ready"),
            ("decode-0", "ready"),
        ]
        assert document["instances"][0]["tokens"] == 20 and document["instances"][1]["held"] == 1
        metrics = {each.name: each for each in InstanceCollector(fleet, fleet.options).collect()}
        (sample,) = metrics["eprt_requests_held"].samples
        assert (sample.labels, sample.value) == ({"rank": "1"}, 1)
        tokens = {s.labels["instance"]: s.value for s in metrics["eprt_instance_tokens"].samples}
        assert tokens == {"prefill-0": 20, "decode-0": 0}
        assert [rank.pid for _, rank in sorted(fleet.ranks.items())] == [101, 100]

    run(life)


def test_an_instance_joins_and_leaves_while_the_others_serve():
    async def life(fleet: GivenFleet) -> None:
        fleet.connect("prefill-1", "prefill", "9")
        assert fleet.instances["prefill-1"].state == "ready" and fleet.num_ranks == 3
        fleet.instances["prefill-1"].rate.tokens_per_s = 1e6
        assert where(fleet, [1] * 50) == "prefill-1"
        fleet.sent("prefill-1")
        fleet.retire_instance("prefill-1")
        with pytest.raises(ApiError, match="prefill-1 is draining: only a ready instance retires"):
            fleet.retire_instance("prefill-1")
        assert where(fleet, [2] * 50) == "prefill-0"
        await asyncio.sleep(0.1)
        assert fleet.sent("prefill-1") == [], "it still has a request"
        (request_id,) = fleet.instances["prefill-1"].pool.sequences.request_ids()
        fleet.abort(request_id)
        assert isinstance((await sent_until_stop(fleet, "prefill-1"))[-1], msg.Stop)
        fleet.on_message(fleet.given["prefill-1"], msg.Bye())
        fleet.on_closed(fleet.given["prefill-1"], False)
        assert list(fleet.instances) == ["prefill-0", "decode-0"] and fleet.num_lost == 0
        assert msg.ForgetSource("prefill-1-9") in fleet.sent("decode-0")
        fleet.connect("prefill-1", "prefill", "10")
        assert fleet.instances["prefill-1"].first_rank == 2 and fleet.num_ranks == 3, "its number is used again"

    run(life)


def test_a_retiring_instances_requests_move_when_its_time_is_over():
    async def life(fleet: GivenFleet) -> None:
        fleet.connect("decode-1", "decode")
        generation = fleet.submit([([5] * 9, PARAMS)])
        (request_id,) = generation.request_ids
        fleet.report("prefill-0", TokenOutput(request_id, 40))
        fleet.hold("prefill-0", request_id)
        (name,) = [one for one in ("decode-0", "decode-1") if fleet.instances[one].pool.num_sequences]
        fleet.arrive(name, request_id)
        fleet.sent("prefill-0")
        fleet.retire_instance(name)
        sent = await sent_until_stop(fleet, name)
        assert [type(one) for one in sent[-2:]] == [msg.AbortRequest, msg.Stop]
        (again,) = fleet.sent("prefill-0")
        assert again.generated == [40] and again.hands_over and generation.num_moved == 1

    run(life, "--prefill", "1", "--decode", "1", "--drain-timeout", "0.1")


def test_the_last_instance_stays():
    async def life(fleet: GivenFleet) -> None:
        fleet.lose_instance("prefill-0")
        with pytest.raises(ApiError, match="decode-0 cannot retire: no other instance is ready"):
            fleet.retire_instance("decode-0")
        with pytest.raises(ApiError, match="instance x: there are prefill-0, decode-0"):
            fleet.retire_instance("x")

    run(life)


def test_nobody_of_another_host_comes_unless_the_operator_says_so():
    async def life(fleet: GivenFleet) -> None:
        with pytest.raises(ApiError, match="start it with --join-address HOST:PORT") as caught:
            await fleet.invite(FarJoinRequest("prefill", 1, "1", "host"))
        assert caught.value.status == 409

    run(life)


def test_a_tier_goes_where_its_tokens_come_in_time_and_is_refused_where_nobody_is():
    async def life(fleet: GivenFleet) -> None:
        best, last = fleet.options.tiers
        for name, step_s in (("decode-0", 0.06), ("decode-1", 0.02)):
            forecast = fleet.instances[name].forecast
            for rows in range(1, 60):
                forecast.steps.add_step(rows % 5, 1, 1e-3 if rows % 5 == 1 else step_s)
            forecast._router.assign(name, [1] * 4)
            forecast.start(name, 0, last, 0)
        chosen = [fleet.chooser.choose_decode([7] * 9, best) for _ in range(9)]
        assert {str(one) for one in chosen} == {"decode-1"}
        generation = fleet.submit([([3] * 30, PARAMS)], None, best)
        assert generation.tier is best
        for name in ("decode-0", "decode-1"):
            for rows in range(1, 99):
                fleet.instances[name].steps.add_step(rows % 5, 1, 1e-3 if rows % 5 == 1 else 0.09)
        with pytest.raises(
            ApiError, match=r"tier max: with one more request a token would take .* its limit is 0.03 s"
        ):
            fleet.submit([([3] * 30, PARAMS), ([4] * 30, PARAMS)], None, best)
        assert fleet.num_sequences == 1
        registry = fleet.metrics.registry
        assert registry.get_sample_value("eprt_tier_requests_total", {"tier": "max", "outcome": "refused"}) == 1

    run(life, "--prefill", "1", "--decode", "2", "--decode-balance", "batch", *TIERS)


TIERS = ("--tier", "max=1,0.03", "--tier", "base=2,0.07", "--max-num-seqs", "9")
