"""DiagnosisRoutes: the routes of findings, mutes, and the page. Knows nothing of what a finding is (diagnosis/)."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from eprt.serve.diagnosis.diagnosis import Diagnosis
from eprt.serve.diagnosis.page import DiagnosisPage
from eprt.serve.errors import invalid
from eprt.serve.group_services import GroupServices
from eprt.serve.http.bodies import Bodies
from eprt.serve.http.responses import JsonResponse


class DiagnosisRoutes:
    """Of one server.

    Args:
        groups: by instance, as they come and go; "": the server is one.
        group_of: of the instance that a request names; ApiError where there is none.
        bodies: reads the bodies of changes.
        make_page: the page of a group's diagnosis.
    """

    def __init__(
        self,
        groups: Mapping[str, GroupServices],
        group_of: Callable[[Request], GroupServices],
        bodies: Bodies,
        make_page: Callable[[Diagnosis], DiagnosisPage],
    ):
        self._groups, self._group_of, self._bodies, self._make_page = groups, group_of, bodies, make_page
        self._pages: dict[str, tuple[Diagnosis, DiagnosisPage]] = {}  # by instance, once somebody looks
        self.routes = [
            Route("/v1/eprt/diagnose", self.diagnose),
            Route("/v1/eprt/diagnose/mutes", self.mutes, methods=["GET", "POST"]),
            Route("/v1/eprt/diagnose/page", self.page_redirect),
            Route("/v1/eprt/diagnose/page/{path:path}", self.page, methods=["GET", "POST"]),
            Route("/v1/eprt/instances/{instance:str}/diagnose/page", self.page_redirect),
            Route("/v1/eprt/instances/{instance:str}/diagnose/page/{path:path}", self.page, methods=["GET", "POST"]),
        ]

    async def diagnose(self, request: Request) -> Response:
        """Findings about slow ranks and links; with ?since=W also the windows after number W."""
        since, diagnosis = request.query_params.get("since"), self._group_of(request).diagnosis
        if since is None:
            return JsonResponse(diagnosis.findings())
        try:
            records = diagnosis.records(int(since))
        except ValueError:
            raise invalid("since", f"since={since!r}: must be a window number") from None
        # Seconds of work for hundreds of ranks; no stream must wait for it.
        lines = await asyncio.to_thread(lambda: [msgspec.Raw(record.to_line().encode()) for record in records])
        return JsonResponse({**diagnosis.findings(), "records": lines})

    async def mutes(self, request: Request) -> Response:
        """GET: the mutes that are not over. POST: one begins, or ends."""
        if request.method == "POST":
            return await self._change_mutes(request)
        diagnosis = self._group_of(request).diagnosis
        mutes: list[Any] = await asyncio.to_thread(diagnosis.known_mutes)
        return JsonResponse({"schema": "eprt.mutes/1", "mutes": mutes})

    async def page_redirect(self, request: Request) -> Response:
        """The page's own addresses are relative to page/."""
        return RedirectResponse("page/")

    async def page(self, request: Request) -> Response:
        """Of the first instance where there are several and none is named: its page leads to the others."""
        if request.url.path == "/v1/eprt/diagnose/page/" and "" not in self._groups and self._groups:
            return RedirectResponse(f"/v1/eprt/instances/{min(self._groups)}/diagnose/page/")
        if request.method == "POST":
            self._page(request).check_changes(request)
            return await self._change_mutes(request)
        return await self._page(request).reply(request)

    async def _change_mutes(self, request: Request) -> Response:
        page = self._page(request)
        async with self._bodies.read(request) as body:
            return await page.change_mutes(request, body)

    def _page(self, request: Request) -> DiagnosisPage:
        """Of the instance's present ranks."""
        name, diagnosis = request.path_params.get("instance", ""), self._group_of(request).diagnosis
        name = name or request.query_params.get("instance", "")
        before, page = self._pages.get(name, (None, None))
        if page is None or before is not diagnosis:
            page = self._make_page(diagnosis)
            self._pages[name] = diagnosis, page
        return page
