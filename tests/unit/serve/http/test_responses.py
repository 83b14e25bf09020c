"""Responses: JSON, event streams, and work that ends when its client is gone."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from starlette.requests import ClientDisconnect

from eprt.serve.http.responses import EventStream, JsonResponse, unless_disconnected


class Client:
    """What a client receives; it leaves after so many pieces of a body."""

    def __init__(self, num_pieces: int | None = None):
        self.messages: list[dict[str, Any]] = []
        self._left, self._num_pieces = asyncio.Event(), num_pieces

    async def receive(self) -> dict[str, Any]:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        if len(self.messages) - 1 == self._num_pieces:
            self._left.set()
            await asyncio.sleep(0)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


def stream_to(client: Client) -> list[str]:
    """Sends an endless stream, or three events; returns what became of their source."""
    ends: list[str] = []

    async def events() -> AsyncIterator[bytes]:
        try:
            for event in range(3 if client._num_pieces is None else 10**6):
                await asyncio.sleep(0)
                yield b"data: %d\n\n" % event
            ends.append("done")
        finally:
            ends.append("closed")

    async def run() -> None:
        await EventStream(events())({}, client.receive, client.send)

    asyncio.run(run())
    return ends


def test_events_go_out_one_by_one_and_the_stream_ends():
    client = Client()
    assert stream_to(client) == ["done", "closed"]
    head, *pieces, last = client.messages
    assert head["status"] == 200 and (b"content-type", b"text/event-stream; charset=utf-8") in head["headers"]
    assert [piece["body"] for piece in pieces] == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n"]
    assert not last["more_body"] and last["body"] == b""


def test_a_stream_whose_client_leaves_closes_its_source():
    client = Client(num_pieces=5)
    assert stream_to(client) == ["closed"]
    assert client.body.startswith(b"data: 0\n\n") and client.messages[-1]["more_body"]


def test_work_ends_when_its_client_leaves_and_else_gives_its_result():
    async def run() -> None:
        client, cancelled = Client(), asyncio.Event()

        async def works() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async def result() -> int:
            return 7

        assert await unless_disconnected(result(), client.receive) == 7
        client._left.set()
        with pytest.raises(ClientDisconnect):
            await unless_disconnected(works(), client.receive)
        assert cancelled.is_set()

    asyncio.run(run())


def test_errors_of_the_work_come_through():
    async def run() -> None:
        async def fails() -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await unless_disconnected(fails(), Client().receive)

    asyncio.run(run())


def test_json_may_hold_what_was_encoded_before():
    response = JsonResponse({"a": msgspec.Raw(b"[1]"), "b": "ü"}, status_code=202)
    assert response.body == '{"a":[1],"b":"ü"}'.encode() and response.status_code == 202
    assert response.headers["content-type"] == "application/json"
