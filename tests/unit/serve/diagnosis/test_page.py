"""The page from the server itself: brought up to date only when there is something new."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from eprt.serve.diagnosis.diagnosis import Diagnosis
from eprt.serve.diagnosis.page import DiagnosisPage
from tests.unit.serve.diagnosis.cases import INFO, N, totals


def test_looking_at_the_page_costs_the_server_something_only_when_there_is_news(monkeypatch):
    diagnosis = Diagnosis(N)
    asked: list[int] = []
    records = diagnosis.records
    monkeypatch.setattr(diagnosis, "records", lambda since: asked.append(since) or records(since))
    page = DiagnosisPage(diagnosis, lambda: True)

    async def windows_shown() -> int:
        request: Any = SimpleNamespace(
            path_params={"path": "api/overview"}, url=SimpleNamespace(scheme="http", netloc="x")
        )
        overview = json.loads(bytes((await page.reply(request)).body))
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
