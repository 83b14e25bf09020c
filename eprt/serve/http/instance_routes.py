"""InstanceRoutes: what operators ask of a server's instances. Knows nothing of who may ask (entrance.py)."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from eprt.serve.errors import ApiError
from eprt.serve.http.responses import JsonResponse
from eprt.serve.instances.document import instances_document
from eprt.serve.instances.fleet import Fleet
from eprt.serve.ranks.pool import RankPool


class InstanceRoutes:
    """Of one server, which may be one group of ranks."""

    def __init__(self, pool: RankPool | Fleet):
        self._pool = pool

    def make_routes(self) -> list[Route]:
        return [
            Route("/v1/eprt/instances", self.instances),
            Route("/v1/eprt/instances/{instance:str}", self.retire_instance, methods=["DELETE"]),
        ]

    async def instances(self, request: Request) -> Response:
        """Each instance: its role, state and load; and what was handed from one to another."""
        return JsonResponse(instances_document(self._fleet()))

    def _fleet(self) -> Fleet:
        if isinstance(self._pool, Fleet):
            return self._pool
        message = "this server is one group of ranks: it was started without --prefill and --decode"
        raise ApiError(404, message, code="not_found")

    async def retire_instance(self, request: Request) -> Response:
        """Lets an instance leave; follow it with GET /v1/eprt/instances."""
        fleet = self._fleet()
        fleet.retire_instance(request.path_params["instance"])
        return JsonResponse(instances_document(fleet), status_code=202)
