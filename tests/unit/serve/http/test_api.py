"""What a client sees of a defect in the server itself."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import httpx

from eprt.serve.http.api import Api
from eprt.serve.options import ServeOptions


def test_a_defect_is_answered_in_openais_shape_and_logged(caplog):
    def findings():
        raise KeyError("a defect")

    nothing = cast(Any, None)
    options = ServeOptions(nothing, "demo")
    app = Api(options, nothing, nothing, cast(Any, SimpleNamespace(findings=findings)), nothing).app()

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app=cast(Any, app), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://eprt") as client:
            return await client.get("/v1/eprt/diagnose", headers={"x-request-id": "d-1"})

    with caplog.at_level(logging.ERROR):
        response = asyncio.run(get())
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (500, "server_error", "internal_error")
    assert "d-1" in error["message"] and response.headers["x-request-id"] == "d-1"
    assert "a defect" in caplog.text and "d-1" in caplog.text
