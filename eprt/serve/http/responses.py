"""Responses: JSON or server-sent events, and work that ends when its client leaves. Knows nothing of their content."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response

_json = msgspec.json.Encoder()


class JsonResponse(Response):
    """msgspec's JSON of any value."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _json.encode(content)


class EventStream(Response):
    """Sends an async iterator of bytes as server-sent events; closes the iterator as soon as the client is gone."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]):
        self._events = events
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def pump() -> None:
            async with aclosing(self._events) as events:  # type: ignore[type-var]
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        # Starlette cannot handle an exception after the head was sent, and a client may leave at any time.
        with contextlib.suppress(ClientDisconnect):
            await unless_disconnected(pump(), receive)


async def unless_disconnected(work, receive) -> Any:
    """The result of a coroutine. Where the client leaves first, the coroutine is cancelled: ClientDisconnect."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
