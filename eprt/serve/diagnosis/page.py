"""DiagnosisPage: the page of `eprt diagnose --url`, from the server itself, under /v1/eprt/diagnose/page/.

Knows nothing of what the page shows: that is eprt.diagnostics.page.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from eprt.serve.diagnosis.diagnosis import Diagnosis

_MOST_WINDOWS = 360  # an hour of work, from the moment somebody looks
_LATE_WINDOWS = 2  # records of late ranks are still added this many windows later


class DiagnosisPage:
    """Replies for the paths under page/. is_open: whether the server serves; event streams end when it does not."""

    def __init__(self, diagnosis: Diagnosis, is_open: Callable[[], bool]):
        self._diagnosis, self._is_open = diagnosis, is_open
        self._page: Any = None
        self._source: Any = None
        self._seen: tuple[int, int] | None = None

    async def redirect(self, request: Request) -> Response:
        """The page's own addresses are relative to page/."""
        return RedirectResponse("page/")

    async def reply(self, request: Request) -> Response:
        from eprt.diagnostics.page.page import EVENTS, HEADERS

        path = request.path_params["path"]
        await self._catch_up(request)
        if path == EVENTS:
            return StreamingResponse(self._events(request), headers=HEADERS, media_type="text/event-stream")
        reply = await asyncio.to_thread(self._page.reply, path)
        return Response(reply.body, reply.status, {**HEADERS, "content-type": reply.media_type})

    async def _events(self, request: Request) -> AsyncIterator[bytes]:
        from eprt.diagnostics.page.page import EVENT_POLL_S, KEEP_ALIVE_S

        sent, silent_s = b"", 0.0
        while self._is_open():
            await self._catch_up(request)
            event = self._page.event()
            if event != sent or silent_s >= KEEP_ALIVE_S:
                yield event if event != sent else b": nothing new\n\n"
                sent, silent_s = event, 0.0
            await asyncio.sleep(EVENT_POLL_S)
            silent_s += EVENT_POLL_S

    async def _catch_up(self, request: Request) -> None:
        """Adds the windows and findings since the last call; most of the time there are none."""
        if self._page is None:
            self._start(f"{request.url.scheme}://{request.url.netloc}")
        version, self._seen = self._seen, self._diagnosis.version
        if version == self._seen:
            return
        newest = max(self._source.history.windows(), default=-1)
        records = self._diagnosis.records(max(-1, newest - _LATE_WINDOWS))
        await asyncio.to_thread(self._source.add_records, records)  # many ranks have megabytes of them
        self._source.set_findings(self._diagnosis.findings())

    def _start(self, name: str) -> None:
        from eprt.diagnostics.page.kept_source import KeptSource
        from eprt.diagnostics.page.page import Page

        findings = self._diagnosis.findings()
        self._source = KeptSource(name, findings["num_ranks"], _MOST_WINDOWS)
        self._source.set_findings(findings)
        self._page = Page(self._source)
