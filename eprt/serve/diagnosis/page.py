"""DiagnosisPage: the page of `eprt diagnose --url`, from the server itself, under /v1/eprt/diagnose/page/.

Knows nothing of what the page shows: that is eprt.diagnostics.page.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from eprt.diagnostics.page.kept_source import KeptSource
from eprt.diagnostics.page.page import EVENT_POLL_S, EVENTS, HEADERS, KEEP_ALIVE_S, Page
from eprt.serve.diagnosis.diagnosis import Diagnosis
from eprt.serve.errors import invalid, quoted

_MOST_WINDOWS = 360  # an hour of work, from the moment somebody looks
_LATE_WINDOWS = 2  # records of late ranks are still added this many windows later


class DiagnosisPage:
    """Replies for the paths under page/. is_open: whether the server serves; event streams end when it does not."""

    def __init__(self, diagnosis: Diagnosis, is_open: Callable[[], bool]):
        self._diagnosis, self._is_open = diagnosis, is_open
        self._page: tuple[Page, KeptSource] | None = None  # once somebody looks
        self._seen: tuple[int, int] | None = None

    async def redirect(self, request: Request) -> Response:
        """The page's own addresses are relative to page/."""
        return RedirectResponse("page/")

    async def reply(self, request: Request) -> Response:
        path = request.path_params["path"]
        wanted = request.query_params.get("format", "json")
        if wanted != "json":
            remedy = "the load of the experts as a file is at /v1/eprt/load?format=npz"
            raise invalid("format", f"format={quoted(wanted)}: the page's data have one format; {remedy}")
        page = await self._catch_up(request)
        if path == EVENTS:
            return StreamingResponse(self._events(request), headers=HEADERS, media_type="text/event-stream")
        reply = await asyncio.to_thread(page.reply, path)
        return Response(reply.body, reply.status, {**HEADERS, "content-type": reply.media_type})

    async def _events(self, request: Request) -> AsyncIterator[bytes]:
        sent, silent_s = b"", 0.0
        while self._is_open():
            event = (await self._catch_up(request)).event()
            if event != sent or silent_s >= KEEP_ALIVE_S:
                yield event if event != sent else b": nothing new\n\n"
                sent, silent_s = event, 0.0
            await asyncio.sleep(EVENT_POLL_S)
            silent_s += EVENT_POLL_S

    async def _catch_up(self, request: Request) -> Page:
        """The page, with the windows and findings since the last call; most of the time there are none."""
        findings = self._diagnosis.findings
        if self._page is None:
            source = KeptSource(f"{request.url.scheme}://{request.url.netloc}", findings()["num_ranks"], _MOST_WINDOWS)
            source.set_findings(findings())
            self._page = Page(source), source
        page, source = self._page
        version, self._seen = self._seen, self._diagnosis.version
        if version != self._seen:
            newest = max(source.history.windows(), default=-1)
            records = self._diagnosis.records(max(-1, newest - _LATE_WINDOWS))
            await asyncio.to_thread(source.add_records, records)  # many ranks have megabytes of them
            source.set_findings(findings())
        return page
