"""--api-key: what needs it, and how it may be given."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from eprt.serve.http.api import Api
from eprt.serve.options import ServeOptions

KEY = "a key"


def status(path: str, *authorization: str, api_key: str | None = KEY) -> int:
    nothing = cast(Any, None)
    options = ServeOptions(nothing, "demo", api_key=api_key)
    diagnosis: Any = SimpleNamespace(findings=lambda: {"findings": []})
    pool: Any = SimpleNamespace(metrics=SimpleNamespace(text=lambda: b""))
    app = Api(options, pool, nothing, diagnosis, nothing).app()

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app=cast(Any, app))
        async with httpx.AsyncClient(transport=transport, base_url="http://eprt") as client:
            return await client.get(path, headers=[("authorization", value) for value in authorization])

    response = asyncio.run(get())
    if response.status_code == 401:
        assert response.json()["error"]["code"] == "invalid_api_key" and KEY not in response.text
    return response.status_code


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_key_opens_every_v1_path(scheme):
    assert status("/v1/eprt/diagnose", f"{scheme} {KEY}") == 200


@pytest.mark.parametrize(
    "authorization",
    [(), ("",), (KEY,), ("Bearer",), ("Bearer ",), ("Bearer a",), (f"Basic {KEY}",), (f"Bearer {KEY}x",)],
)
@pytest.mark.parametrize("path", ["/v1/eprt/diagnose", "/v1/eprt/diagnose/page/", "/v1%2feprt/diagnose", "/v1/nothing"])
def test_nothing_else_does(path, authorization):
    assert status(path, *authorization) == 401


def test_probes_need_none_and_without_the_flag_nothing_does():
    assert status("/metrics") == 200
    assert status("/v1/eprt/diagnose", api_key=None) == 200
