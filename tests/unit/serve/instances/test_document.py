"""eprt.instances/1: what is on its way, and what each tier got."""

import asyncio

from eprt.engine.outputs import TokenOutput
from eprt.engine.sampling_params import SamplingParams
from eprt.serve.instances.document import group_document, instances_document
from tests.unit.serve.instances.cases import GivenFleet

TIERS = ("--tier", "max=1.0,0.5", "--tier", "base=5,1")


def test_a_request_on_its_way_has_its_pages_bytes_and_age():
    async def go() -> None:
        fleet = GivenFleet("--prefill", "1", "--decode", "1")
        (request_id,) = fleet.submit([([5, 6, 7], SamplingParams(max_tokens=8))]).request_ids
        fleet.report("prefill-0", TokenOutput(request_id, 40))
        assert instances_document(fleet)["handoffs"]["oldest"] == []
        fleet.hold("prefill-0", request_id, 3)
        handoffs = instances_document(fleet)["handoffs"]
        (offer,) = handoffs["oldest"]
        age_s = offer.pop("age_s")
        assert offer == {"request": request_id, "from": "prefill-0", "to": "decode-0", "pages": 3, "bytes": 24}
        assert age_s >= 0 and handoffs["under_way"] == 1
        fleet.arrive("decode-0", request_id, 3)
        assert instances_document(fleet)["handoffs"]["oldest"] == []
        assert instances_document(fleet)["tiers"] == []

    asyncio.run(go())


def test_a_tier_has_its_limits_what_is_there_and_what_its_requests_got():
    async def go() -> None:
        fleet = GivenFleet("--prefill", "1", "--decode", "1", *TIERS)
        tier = fleet.options.tiers[0]
        generation = fleet.submit([([5, 6, 7], SamplingParams(max_tokens=1))], tier=tier)
        first, second = instances_document(fleet)["tiers"]
        assert (first["name"], first["ttft_s"], first["itl_s"], first["sequences"]) == ("max", 1.0, 0.5, 1)
        assert (second["name"], second["sequences"], set(second["requests"].values())) == ("base", 0, {0})
        fleet.report("prefill-0", TokenOutput(generation.request_ids[0], 40, finish_reason="length"))
        first = instances_document(fleet)["tiers"][0]
        assert (first["sequences"], first["requests"]["met"], first["tokens"]["met"]) == (0, 1, 1)
        pool = fleet.instances["decode-0"].pool
        document = group_document(pool)
        assert document is not None and document["instances"] == [] and document["tiers"][0]["requests"]["met"] == 1

    asyncio.run(go())


def test_one_group_without_tiers_has_nothing_to_tell():
    async def go() -> None:
        assert group_document(GivenFleet("--prefill", "1", "--decode", "1").instances["decode-0"].pool) is None

    asyncio.run(go())
