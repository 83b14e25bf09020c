"""Mutes over HTTP: the entrance's rule for changes holds, the file is that of --mute, and the page says who may."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from eprt.diagnostics.mutes import mutes_beside
from starlette.applications import Starlette

from eprt.serve.diagnosis.diagnosis import Diagnosis
from eprt.serve.diagnosis.page import DiagnosisPage
from eprt.serve.errors import ApiError
from eprt.serve.http.api import _api_error, _http_error
from eprt.serve.http.bodies import Bodies
from eprt.serve.http.diagnosis_routes import DiagnosisRoutes
from eprt.serve.http.entrance import Entrance
from eprt.serve.keys import NO_KEYS, ServerKeys
from tests.unit.serve.diagnosis.cases import INFO, N, totals

PAGE, MUTES = "/v1/eprt/diagnose/page/", "/v1/eprt/diagnose/mutes"
ADMIN = ServerKeys(admins=("secret",))
MUTE = {"place": "column:3", "until": "12h", "note": "on order"}


def ask(
    diagnosis: Diagnosis,
    go: Callable[[httpx.AsyncClient], Awaitable[None]],
    keys: ServerKeys = NO_KEYS,
    client: str = "127.0.0.1",
    instances: tuple[str, ...] = ("",),
) -> None:
    """Behind the entrance, with five windows in which rank 3 is slow."""

    def make_page(diagnosis: Diagnosis) -> DiagnosisPage:
        return DiagnosisPage(diagnosis, lambda: True, bool(keys.admins))

    group: Any = SimpleNamespace(diagnosis=diagnosis)
    groups = {instance: group for instance in instances}
    routes = DiagnosisRoutes(groups, lambda request: group, Bodies(1000, 5.0), make_page).routes
    handlers: Any = {ApiError: _api_error, Exception: _http_error}
    app: Any = Entrance(Starlette(routes=routes, exception_handlers=handlers), keys)

    async def run() -> None:
        for window in range(1, 6):
            await diagnosis.close_window(totals(window, slow=3), INFO)
            await diagnosis.wait_analysed()
        transport = httpx.ASGITransport(app=app, client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://eprt") as http:
            await go(http)

    asyncio.run(run())


async def places(http: httpx.AsyncClient) -> dict[str, float | None]:
    overview = (await http.get(f"{PAGE}api/overview")).json()
    return {finding["place"]: finding["muted_until"] for finding in overview["findings"]["findings"]}


def test_a_mute_begins_and_ends(tmp_path):
    diagnosis = Diagnosis(N, str(tmp_path))

    async def go(http: httpx.AsyncClient) -> None:
        assert await places(http) == {"column:3": None}
        for path in (MUTES, f"{PAGE}api/mutes"):
            told = (await http.post(path, json=MUTE)).json()
            (mute,) = mutes_beside(tmp_path)
            assert (mute.place, mute.until, mute.note) == ("column:3", told["muted_until"], "on order")
            listed = (await http.get(MUTES)).json()
            assert listed == {
                "schema": "eprt.mutes/1",
                "mutes": [{"place": "column:3", "until": mute.until, "note": "on order"}],
            }
            assert await places(http) == {"column:3": mute.until}, "the page knows at once"
            assert (await http.post(path, json={"place": "column:3", "until": None})).json()["changed"]
            assert await places(http) == {"column:3": None} and not mutes_beside(tmp_path)
        for wrong in ("rank:3", f"column:{N}", "node:99"):
            assert (await http.post(MUTES, json={"place": wrong, "until": "1h"})).status_code == 400
        assert (await http.post(f"{PAGE}api/overview")).json()["error"]["code"] == "method_not_allowed"

    ask(diagnosis, go)


def test_a_server_without_a_log_has_no_place_for_mutes():
    async def go(http: httpx.AsyncClient) -> None:
        reply = await http.post(MUTES, json=MUTE)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (403, "read_only") and "--diagnose-dir" in error["message"]
        overview = (await http.get(f"{PAGE}api/overview")).json()
        assert overview["muting"] == {"refusal": error["message"], "asks_for_key": False}

    ask(Diagnosis(N), go)


@pytest.mark.parametrize("path", [MUTES, f"{PAGE}api/mutes"])
def test_the_rule_for_changes_holds(tmp_path, path):
    browser = {"origin": "http://eprt"}

    async def without_key(http: httpx.AsyncClient) -> None:
        refused = await http.post(path, json=MUTE, headers=browser)
        assert refused.json()["error"]["code"] == "local_only"
        muting = (await http.get(f"{PAGE}api/overview")).json()["muting"]
        assert "--admin-key-file" in muting["refusal"] and not muting["asks_for_key"]

    async def with_key(http: httpx.AsyncClient) -> None:
        assert (await http.post(path, json=MUTE)).json()["error"]["code"] == "admin_key_required"
        muting = (await http.get(f"{PAGE}api/overview")).json()["muting"]
        assert muting == {"refusal": "", "asks_for_key": True}
        headers = {**browser, "authorization": "Bearer secret"}
        assert (await http.post(path, json=MUTE, headers=headers)).status_code == 200

    ask(Diagnosis(N, str(tmp_path / "a")), without_key)
    ask(Diagnosis(N, str(tmp_path / "b")), with_key, ADMIN, "192.0.2.7")
    assert not mutes_beside(tmp_path / "a") and len(mutes_beside(tmp_path / "b")) == 1


def test_the_page_of_several_instances_is_that_of_the_first(tmp_path):
    async def go(http: httpx.AsyncClient) -> None:
        reply = await http.get(PAGE)
        assert reply.headers["location"] == "/v1/eprt/instances/decode-0/diagnose/page/"
        assert (await http.get(reply.headers["location"])).status_code == 200
        assert (await http.get(PAGE.rstrip("/"))).headers["location"] == "page/"

    ask(Diagnosis(N, str(tmp_path)), go, instances=("prefill-0", "decode-0"))
