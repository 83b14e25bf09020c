"""The HTTP routes: defects, unknown paths, the model's names; and long bodies, read beside the server's loop."""

import asyncio
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.requests import ClientDisconnect

from eprt.serve.errors import ApiError
from eprt.serve.http.api import Api
from eprt.serve.keys import ServerKeys
from eprt.serve.openai.face import ChatFace
from eprt.serve.openai.prepare import Preparer
from eprt.serve.options import ServeOptions
from tests.unit.serve.http.cases import make_request

NOTHING = cast(Any, None)


def get(app: Any, path: str, *, method: str = "GET", headers: Any = None) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://eprt") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(send())


def test_a_defect_is_answered_in_openais_shape_and_logged(caplog):
    def findings():
        raise KeyError("a defect")

    diagnosis: Any = SimpleNamespace(findings=findings)
    groups: Any = {"": SimpleNamespace(diagnosis=diagnosis)}
    app = Api(ServeOptions(NOTHING, "demo"), NOTHING, NOTHING, groups).app()
    with caplog.at_level(logging.ERROR):
        response = get(app, "/v1/eprt/diagnose", headers={"x-request-id": "d-1"})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (500, "server_error", "internal_error")
    assert "d-1" in error["message"] and response.headers["x-request-id"] == "d-1"
    assert "a defect" in caplog.text and "d-1" in caplog.text


def test_what_is_not_there_is_named_with_what_is():
    app = Api(ServeOptions(NOTHING, "demo"), NOTHING, NOTHING, {}).app()
    missing = get(app, "/v1/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"
    assert "nothing at GET /v1/nothing; there are /health, " in missing.json()["error"]["message"]
    wrong = get(app, "/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["message"] == "/v1/completions does not take GET, only POST"


@pytest.mark.parametrize("rank", ["9" * 5000, "\u0661", "-1", "x", "1.0"])
def test_a_rank_that_is_no_number_is_not_found(rank):
    pool: Any = SimpleNamespace(check_open=lambda: None)
    groups: Any = {"": SimpleNamespace(pool=SimpleNamespace(elasticity=None))}
    app = Api(ServeOptions(NOTHING, "demo"), pool, NOTHING, groups, ServerKeys(admins=("k",))).app()
    answer = get(app, f"/v1/eprt/ranks/{rank}/retire", method="POST", headers={"authorization": "Bearer k"})
    assert answer.status_code == 404 and len(answer.text) < 300, answer.text


def test_the_model_is_listed_by_each_of_its_names():
    pool: Any = SimpleNamespace(limits=None)
    engine: Any = SimpleNamespace(model_dir="demo")
    options = ServeOptions(engine, "demo", model_aliases=("small", "org/demo"))
    preparer = Preparer("demo", None, None, 1, aliases=options.model_aliases)
    app = Api(options, pool, preparer, {}).app()
    assert [card["id"] for card in get(app, "/v1/models").json()["data"]] == ["demo", "small", "org/demo"]
    assert get(app, "/v1/models/org/demo").json()["id"] == "org/demo"
    assert get(app, "/v1/models/other").status_code == 404


class _Pool:
    """Takes no request: here it ends where it would be submitted."""

    limits = None
    metrics = SimpleNamespace(observe_request=lambda *given: None)

    def check_open(self) -> None: ...

    def submit(self, sequences, cache_key=None, tier=None) -> None:
        raise ApiError(429, "enough", code="enough")


class _Work(ChatFace):
    """What is done of each body; reading takes a while, and two are prepared side by side."""

    def __init__(self):
        self.num_read = self.reading = self.most_reading = 0
        self.both = threading.Barrier(2)

    def parse(self, body: bytes) -> bytes:
        self.reading += 1
        self.num_read, self.most_reading = self.num_read + 1, max(self.most_reading, self.reading)
        time.sleep(0.02)
        self.reading -= 1
        return body

    def prepare(self, *given) -> Any:
        self.both.wait(100)
        job = SimpleNamespace(sequences=[], cache_key=None, form=None, tier=None)
        job.with_tier = lambda table, key_tier: job
        return job


def _generate(work: _Work, *gone: bool) -> list[Any]:
    """What becomes of requests that come at once; those marked have been given up by their clients."""

    async def run() -> list[Any]:
        options = SimpleNamespace(max_body_bytes=1 << 20, body_timeout_s=100, tiers=(), default_tier="")
        api = Api(options, _Pool(), None, {})  # type: ignore[arg-type]
        return await asyncio.gather(*(api._generate(make_request(one), work) for one in gone), return_exceptions=True)

    return asyncio.run(run())


def test_bodies_are_read_one_after_the_other_and_prepared_side_by_side():
    work = _Work()
    assert [getattr(error, "code", error) for error in _generate(work, *[False] * 4)] == ["enough"] * 4
    assert (work.num_read, work.most_reading) == (4, 1)


def test_nobody_reads_the_body_of_a_client_that_has_left():
    work = _Work()
    first, gone, last = _generate(work, False, True, False)
    assert isinstance(gone, ClientDisconnect) and first.code == last.code == "enough"
    assert work.num_read == 2
