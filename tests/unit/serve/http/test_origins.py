"""Pages of which origins may call the server, refusals included."""

import asyncio
from typing import Any

import httpx

from eprt.serve.http.origins import with_origins
from eprt.serve.http.responses import JsonResponse


async def _refuse(scope, receive, send) -> None:
    await JsonResponse({"error": {}}, status_code=401)(scope, receive, send)


def ask(origins: tuple[str, ...], method: str, **headers: str) -> httpx.Response:
    app: Any = with_origins(_refuse, origins)

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://eprt") as http:
            return await http.request(
                method, "/v1/models", headers={k.replace("_", "-"): v for k, v in headers.items()}
            )

    return asyncio.run(send())


ASKS: dict[str, str] = {
    "access_control_request_method": "POST",
    "access_control_request_headers": "authorization,content-type",
}


def test_a_page_asks_first_and_then_reads_refusals_too():
    allowed = ("https://chat.example.org",)
    asked = ask(allowed, "OPTIONS", origin=allowed[0], **ASKS)
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == allowed[0]
    assert "authorization" in asked.headers["access-control-allow-headers"]
    # A page deletes responses that it had kept.
    asked = ask(allowed, "OPTIONS", origin=allowed[0], **{**ASKS, "access_control_request_method": "DELETE"})
    assert asked.status_code == 200 and "DELETE" in asked.headers["access-control-allow-methods"]
    refused = ask(allowed, "POST", origin=allowed[0])
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == allowed[0]
    assert "x-request-id" in refused.headers["access-control-expose-headers"]


def test_other_pages_get_no_leave():
    for origins in ((), ("https://chat.example.org",)):
        assert "access-control-allow-origin" not in ask(origins, "POST", origin="https://evil.example").headers
    assert ask(("https://chat.example.org",), "OPTIONS", origin="https://evil.example", **ASKS).status_code == 400


def test_a_star_lets_every_page_in():
    assert ask(("*",), "POST", origin="https://any.example").headers["access-control-allow-origin"] == "*"
