"""DiagnosisPage: the page of `eprt diagnose --url`, from the server itself, under /v1/eprt/diagnose/page/.

Knows nothing of what the page shows: that is eprt.diagnostics.page.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from eprt.diagnostics.mutes import MuteChange
from eprt.diagnostics.page.kept_source import KeptSource
from eprt.diagnostics.page.page import EVENT_POLL_S, EVENTS, HEADERS, INSTANCES, KEEP_ALIVE_S, MUTES, Page
from eprt.diagnostics.page.recording import ReadOnlyError
from eprt.serve.diagnosis.diagnosis import Diagnosis
from eprt.serve.errors import ApiError, invalid, quoted

_MOST_WINDOWS = 360  # an hour of work, from the moment somebody looks
_LATE_WINDOWS = 2  # records of late ranks are still added this many windows later


_NO_ADMIN_KEY = (
    "the server has no admin key, so only processes of its host may change it: run `eprt diagnose --url` there, or "
    "start it with --admin-key-file FILE"
)


class LiveSource(KeptSource):
    """The windows of this server's own diagnosis.

    Args:
        has_admin_key: whether a browser can show that it may change the server.
        instances: gives eprt.instances/1, or None where there is nothing of it.
    """

    def __init__(
        self,
        name: str,
        diagnosis: Diagnosis,
        has_admin_key: bool,
        instances: Callable[[], dict[str, Any] | None] | None,
    ):
        super().__init__(name, diagnosis.findings()["num_ranks"], _MOST_WINDOWS)
        self.asks_for_key, self._diagnosis, self._instances = has_admin_key, diagnosis, instances

    def why_read_only(self) -> str:
        return self._diagnosis.why_read_only() or ("" if self.asks_for_key else _NO_ADMIN_KEY)

    def change_mutes(self, change: MuteChange) -> bool:
        if why := self._diagnosis.why_read_only():  # who may was asked at the entrance
            raise ReadOnlyError(why)
        return self._diagnosis.change_mutes(change)

    def instances(self) -> dict[str, Any] | None:
        return None if self._instances is None else self._instances()


class DiagnosisPage:
    """Replies for the paths under page/.

    Args:
        is_open: whether the server serves; event streams end when it does not.
        has_admin_key, instances: as LiveSource has them.
    """

    def __init__(
        self,
        diagnosis: Diagnosis,
        is_open: Callable[[], bool],
        has_admin_key: bool = False,
        instances: Callable[[], dict[str, Any] | None] | None = None,
    ):
        self._diagnosis, self._is_open = diagnosis, is_open
        self._has_admin_key, self._instances = has_admin_key, instances
        self._page: tuple[Page, LiveSource] | None = None  # once somebody looks
        self._seen: tuple[int, int] | None = None

    async def reply(self, request: Request) -> Response:
        path = request.path_params["path"]
        wanted = request.query_params.get("format", "json")
        if wanted != "json":
            remedy = "the load of the experts as a file is at /v1/eprt/load?format=npz"
            raise invalid("format", f"format={quoted(wanted)}: the page's data have one format; {remedy}")
        page = await self._catch_up(request)
        if path == EVENTS:
            return StreamingResponse(self._events(request), headers=HEADERS, media_type="text/event-stream")
        if path == INSTANCES:  # reads what this thread changes
            reply = page.reply(path)
        else:
            reply = await asyncio.to_thread(page.reply, path)
        return Response(reply.body, reply.status, {**HEADERS, "content-type": reply.media_type})

    def check_changes(self, request: Request) -> None:
        """ApiError for a POST to what is only read."""
        if request.path_params["path"] != MUTES:
            raise ApiError(405, f"{request.url.path} does not take POST", code="method_not_allowed")

    async def change_mutes(self, request: Request, body: bytes) -> Response:
        page = await self._catch_up(request)
        reply = await asyncio.to_thread(page.change_mutes, body)
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
            name = f"{request.url.scheme}://{request.url.netloc}"
            source = LiveSource(name, self._diagnosis, self._has_admin_key, self._instances)
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
