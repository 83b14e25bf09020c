"""What ranks are told of a sequence on its way between instances, and what becomes of it when something ends."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from eprt.engine.outputs import TokenOutput
from eprt.engine.sampling_params import SamplingParams
from eprt.serve.errors import ApiError
from eprt.serve.ranks import messages as msg
from eprt.serve.ranks.generation import Generation
from tests.unit.serve.instances.cases import GivenFleet, held

P, D, D2 = "prefill-0", "decode-0", "decode-1"
PROMPT, PARAMS = [5, 6, 7], SamplingParams(seed=3, max_tokens=8)
FLAGS = ("--prefill", "1", "--decode", "2", "--decode-balance", "batch")


def run(life: Callable[[GivenFleet], Coroutine], *flags: str) -> None:
    async def go() -> None:
        await life(GivenFleet(*(flags or FLAGS)))

    asyncio.run(go())


def started(fleet: GivenFleet) -> tuple[Generation, str]:
    generation = fleet.submit([(PROMPT, PARAMS)])
    return generation, generation.request_ids[0]


async def tokens(generation: Generation) -> list[int]:
    return [output.token_id for _, output in await generation.next_outputs()]


def offered(fleet: GivenFleet) -> tuple[Generation, str, str]:
    """A sequence whose first token is there, and the decode instance that it was offered to."""
    generation, request_id = started(fleet)
    fleet.report(P, TokenOutput(request_id, 40))
    fleet.sent(P)
    fleet.hold(P, request_id)
    (name,) = [name for name in (D, D2) if fleet.instances[name].pool.num_sequences]
    return generation, request_id, name


def test_a_sequence_goes_from_one_to_the_other():
    async def life(fleet: GivenFleet) -> None:
        generation, request_id = started(fleet)
        (add,) = fleet.sent(P)
        assert add == msg.AddRequest(1, request_id, PROMPT, PARAMS, 0, hands_over=True)
        fleet.report(P, TokenOutput(request_id, 40))
        assert await tokens(generation) == [40], "the client has it before anything moves"
        fleet.hold(P, request_id, 2)
        (name,) = [name for name in (D, D2) if fleet.instances[name].pool.num_sequences]
        (adopt,) = fleet.sent(name)
        assert adopt.request == msg.AddRequest(0, request_id, PROMPT, PARAMS, 0, generated=[40])
        assert adopt.held.pages == [0, 1] and fleet.sent(P) == [], "its pages are held"
        fleet.arrive(name, request_id, 1)
        assert fleet.sent(name) == [msg.StartAdopted(1, request_id)] and fleet.sent(P) == [msg.AbortRequest(request_id)]
        fleet.report(name, TokenOutput(request_id, 41), TokenOutput(request_id, 42, finish_reason="length"))
        assert await tokens(generation) == [41, 42]
        counts = fleet.handoffs.counts
        assert (counts.num_done, counts.num_pulled, counts.num_shared) == (1, 1, 1)
        assert fleet.num_sequences == 0 and not fleet.handoffs.offers
        await asyncio.wait_for(fleet.wait_quiet(), 1)

    run(life)


def test_pages_that_cannot_be_used_are_computed_where_they_were_to_go():
    async def life(fleet: GivenFleet) -> None:
        _, request_id, name = offered(fleet)
        fleet.sent(name)
        fleet.arrive(name, request_id, error="damaged")
        assert fleet.sent(name) == [msg.AddRequest(1, request_id, PROMPT, PARAMS, 0, generated=[40])]
        assert fleet.sent(P) == [msg.AbortRequest(request_id)] and fleet.handoffs.counts.num_failed == 1

    run(life)


def test_pages_that_nobody_reads_in_time_are_let_go():
    async def life(fleet: GivenFleet) -> None:
        _, request_id, name = offered(fleet)
        fleet.sent(name)
        fleet.handoffs.give_up_late()
        assert fleet.sent(P) == fleet.sent(name) == []
        fleet.handoffs.offers[request_id].since_s -= 31
        fleet.handoffs.give_up_late()
        again = msg.AddRequest(1, request_id, PROMPT, PARAMS, 0, generated=[40])
        assert fleet.sent(name) == [msg.AbortRequest(request_id), again]
        assert fleet.sent(P) == [msg.AbortRequest(request_id)] and fleet.handoffs.counts.num_late == 1
        fleet.arrive(name, request_id)  # it was on its way
        assert fleet.sent(name) == [] and fleet.handoffs.counts.num_done == 0

    run(life)


@pytest.mark.parametrize("phase", ["computed", "held", "offered", "running"])
def test_a_client_that_leaves_is_forgotten_everywhere(phase):
    async def life(fleet: GivenFleet) -> None:
        generation, request_id = started(fleet)
        fleet.sent(P)
        name = D
        if phase != "computed":
            fleet.report(P, TokenOutput(request_id, 40))
        if phase in ("offered", "running"):
            fleet.hold(P, request_id)
            (name,) = [name for name in (D, D2) if fleet.instances[name].pool.num_sequences]
        if phase == "running":
            fleet.arrive(name, request_id)
            fleet.sent(P)
        fleet.sent(name)
        generation.abort_all()
        dropped = [msg.AbortRequest(request_id)]
        assert fleet.sent(P) == ([] if phase == "running" else dropped)
        assert fleet.sent(name) == (dropped if phase in ("offered", "running") else [])
        if phase == "held":  # which the client's leaving has crossed
            fleet.hold(P, request_id)
            assert fleet.sent(P) == dropped
        assert fleet.num_sequences == 0 and not fleet.handoffs.offers

    run(life)


def test_a_lost_decode_instance_costs_nothing_where_pages_are_still_held():
    async def life(fleet: GivenFleet) -> None:
        generation, request_id, name = offered(fleet)
        other = D2 if name == D else D
        fleet.lose_instance(name)
        (adopt,) = [one for one in fleet.sent(other) if isinstance(one, msg.Adopt)]
        assert adopt.request.generated == [40] and generation.num_moved == 1
        fleet.sent(P)
        fleet.arrive(other, request_id)
        assert fleet.sent(P) == [msg.AbortRequest(request_id)]
        assert fleet.sent(other) == [msg.StartAdopted(1, request_id)]

    run(life)


def test_a_lost_decode_instances_sequences_begin_again_behind_what_their_clients_have():
    async def life(fleet: GivenFleet) -> None:
        _, request_id, name = offered(fleet)
        fleet.arrive(name, request_id)
        fleet.report(name, TokenOutput(request_id, 41))
        fleet.sent(P)
        fleet.lose_instance(name)
        add = [one for one in fleet.sent(P) if isinstance(one, msg.AddRequest)]
        assert add == [msg.AddRequest(2, request_id, PROMPT, PARAMS, 0, generated=[40, 41], hands_over=True)]
        assert fleet.instances[name].state == "lost" and fleet.state == "serving" and fleet.num_lost == 1

    run(life)


def test_without_a_prefill_instance_decode_instances_compute_prompts():
    async def life(fleet: GivenFleet) -> None:
        started(fleet)
        fleet.lose_instance(P)
        sent = {name: [one for one in fleet.sent(name) if isinstance(one, msg.AddRequest)] for name in (D, D2)}
        assert sorted(map(len, sent.values())) == [0, 1]
        assert not any(one.hands_over for each in sent.values() for one in each)
        started(fleet)
        assert fleet.instances[D].pool.num_sequences == fleet.instances[D2].pool.num_sequences == 1

    run(life)


def test_a_lost_prefill_instances_pages_are_read_as_far_as_they_were_offered():
    async def life(fleet: GivenFleet) -> None:
        _, request_id, name = offered(fleet)
        fleet.sent(name)
        fleet.lose_instance(P)
        assert fleet.sent(name) == [msg.ForgetSource("prefill-0-1")]
        fleet.arrive(name, request_id)
        assert fleet.sent(name) == [msg.StartAdopted(1, request_id)]

    run(life)


def test_without_a_decode_instance_the_prefill_instance_goes_on():
    async def life(fleet: GivenFleet) -> None:
        _, request_id = started(fleet)
        fleet.report(P, TokenOutput(request_id, 40))
        fleet.lose_instance(D)
        fleet.lose_instance(D2)
        fleet.sent(P)
        fleet.hold(P, request_id)
        again = msg.AddRequest(2, request_id, PROMPT, PARAMS, 0, generated=[40])
        assert fleet.sent(P) == [msg.AbortRequest(request_id), again]
        started(fleet)
        assert not fleet.sent(P)[0].hands_over

    run(life)


def test_the_last_instance_that_is_lost_ends_the_server():
    async def life(fleet: GivenFleet) -> None:
        generation, _ = started(fleet)
        for name in (D, D2, P):
            fleet.lose_instance(name)
        with pytest.raises(ApiError, match="no instance is left"):
            await generation.next_outputs()
        await asyncio.wait_for(fleet.ended.wait(), 1)
        assert fleet.state == "lost"
        with pytest.raises(ApiError, match="no new requests"):
            started(fleet)

    run(life)


def test_several_prompts_and_samples_of_one_request_come_back_under_their_indices():
    async def life(fleet: GivenFleet) -> None:
        params: Any = SamplingParams(n=2, seed=1, max_tokens=1)
        generation = fleet.submit([([1], params), ([2], params)])
        assert len(set(generation.request_ids)) == 4
        for token_id, request_id in enumerate(generation.request_ids):
            fleet.report(P, TokenOutput(request_id, token_id, finish_reason="length"))
        assert [(i, output.token_id) for i, output in await generation.next_outputs()] == [(i, i) for i in range(4)]

    run(life)


def test_a_better_tier_is_computed_where_others_must_give_way():
    async def life(fleet: GivenFleet) -> None:
        best, last = fleet.options.tiers

        def hand_over(tier) -> tuple[str, list]:
            (request_id,) = fleet.submit([(PROMPT, PARAMS)], None, tier).request_ids
            fleet.report(P, TokenOutput(request_id, 40))
            fleet.sent(P)
            fleet.hold(P, request_id)
            return request_id, fleet.sent(D)

        for _ in range(2):  # that is what runs at once
            _, (adopt,) = hand_over(last)
            assert isinstance(adopt, msg.Adopt)
        _, (adopt,) = hand_over(last)
        assert isinstance(adopt, msg.Adopt), "nobody gives way to the last tier"
        request_id, (add,) = hand_over(best)
        assert isinstance(add, msg.AddRequest) and add.generated == [40] and not add.hands_over
        assert add.params.priority == 0 and fleet.sent(P) == [msg.AbortRequest(request_id)]
        assert request_id not in fleet.handoffs.offers

    run(life, "--prefill", "1", "--decode", "1", "--tier", "max=1,9", "--tier", "base=2,9", "--max-queue", "9")


@pytest.mark.parametrize(
    "far, expected",
    [((), ("", 7)), ((P,), ("10.0.0.2", 7)), ((D, D2), ("10.0.0.1", 7)), ((P, D, D2), ("10.0.0.2", 7))],
)
def test_pages_are_offered_at_the_address_where_their_reader_finds_them(far, expected):
    """The holder's own, as the server sees it, or that at which the reader has found the server."""

    async def life(fleet: GivenFleet) -> None:
        places = {"peername": ("10.0.0.2", 99), "sockname": ("10.0.0.1", 99)}
        for name in far:
            fleet.given[name].transport = Mock(get_extra_info=places.get)
        _, request_id = started(fleet)
        fleet.report(P, TokenOutput(request_id, 40))
        pages = held(1)
        source = msgspec.structs.replace(pages.source, address=("", 7))
        fleet.on_message(fleet.given[P], msg.Held(request_id, msgspec.structs.replace(pages, source=source)))
        (name,) = [name for name in (D, D2) if fleet.instances[name].pool.num_sequences]
        (adopt,) = fleet.sent(name)
        assert adopt.held.source.address == expected

    run(life)
