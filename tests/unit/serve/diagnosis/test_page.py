"""The page from the server itself: brought up to date only when there is something new."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from eprt.serve.diagnosis.diagnosis import Diagnosis
from eprt.serve.diagnosis.page import DiagnosisPage
from eprt.serve.errors import ApiError
from eprt.serve.ranks.messages import WaitTotals
from tests.unit.serve.diagnosis.cases import INFO, N, totals


def asked_for(path: str, **query: str) -> Any:
    return SimpleNamespace(
        path_params={"path": path}, query_params=query, url=SimpleNamespace(scheme="http", netloc="x")
    )


def test_looking_at_the_page_costs_the_server_something_only_when_there_is_news(monkeypatch):
    diagnosis = Diagnosis(N)
    asked: list[int] = []
    records = diagnosis.records
    monkeypatch.setattr(diagnosis, "records", lambda since: asked.append(since) or records(since))
    page = DiagnosisPage(diagnosis, lambda: True)

    async def windows_shown() -> int:
        overview = json.loads(bytes((await page.reply(asked_for("api/overview"))).body))
        assert overview["findings"]["windows"] == len(overview["windows"]["window"])
        return len(overview["windows"]["window"])

    async def go() -> None:
        for window in (1, 2):
            await diagnosis.close_window(totals(window), INFO)
            await diagnosis.wait_analysed()
            for _ in range(3):
                assert await windows_shown() == window
            assert len(asked) == window

    asyncio.run(go())


async def experts(diagnosis: Diagnosis, **query: str) -> dict[str, Any]:
    page = DiagnosisPage(diagnosis, lambda: True)
    reply = await page.reply(asked_for("api/experts/newest", **query))
    assert reply.status_code == 200
    return json.loads(bytes(reply.body))


def test_the_newest_experts_are_answered_with_windows_or_without():
    async def go() -> None:
        diagnosis = Diagnosis(N)
        fresh = await experts(diagnosis)
        assert fresh["experts"] is None and fresh["migrations"] == {"total": 0, "moves": []} and fresh["notes"]
        for window in (1, 2):
            await diagnosis.close_window(totals(window), INFO)
        still = await experts(diagnosis, format="json")
        assert len(still["experts"]["rows"][0]) == 2 * N and still["migrations"]["total"] == 0
        for window in (3, 4):
            await diagnosis.close_window(totals(window), INFO)
        assert (await experts(diagnosis))["migrations"]["total"] == 2, "slot 0 of rank 1 changed in two layers"
        await diagnosis.wait_analysed()

    asyncio.run(go())


def alone(totals: WaitTotals, num_ranks: int) -> WaitTotals:
    """Of a group of this size, without slots."""
    fields = msgspec.structs.asdict(totals)
    fields = {name: value[:num_ranks] if isinstance(value, list) else value for name, value in fields.items()}
    return WaitTotals(**{**fields, "slots": None})


@pytest.mark.parametrize("num_ranks", [1, N])
def test_a_model_without_experts_has_none_to_show(num_ranks):
    """A dense model, or a rank by itself: its ranks report no slots."""
    info: Any = SimpleNamespace(node_of_rank=(0,) * num_ranks, moe_layers=())

    async def go() -> None:
        diagnosis = Diagnosis(num_ranks)
        for window in (1, 2):
            waits = {rank: alone(totals(window)[rank], num_ranks) for rank in range(num_ranks)}
            await diagnosis.close_window(waits, info)
        assert (await experts(diagnosis))["experts"] is None
        await diagnosis.wait_analysed()

    asyncio.run(go())


def test_another_format_is_refused_with_where_it_is():
    page = DiagnosisPage(Diagnosis(N), lambda: True)
    with pytest.raises(ApiError, match=r"/v1/eprt/load\?format=npz") as caught:
        asyncio.run(page.reply(asked_for("api/experts/newest", format="npz")))
    assert (caught.value.status, caught.value.param) == (400, "format")
