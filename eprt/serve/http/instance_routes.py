"""InstanceRoutes: what operators ask of a server's instances. Knows nothing of who may ask (entrance.py)."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from eprt.serve.errors import ApiError, invalid, quoted, shortened, unsupported
from eprt.serve.http.bodies import Bodies
from eprt.serve.http.responses import JsonResponse
from eprt.serve.instances.document import instances_document
from eprt.serve.instances.far_joins import FarJoinRequest
from eprt.serve.instances.fleet import Fleet
from eprt.serve.openai.parsing import given_fields
from eprt.serve.options import MOST_RANKS, ROLES
from eprt.serve.ranks.pool import RankPool


class InstanceRoutes:
    """Of one server, which may be one group of ranks."""

    def __init__(self, pool: RankPool | Fleet, bodies: Bodies):
        self._pool, self._bodies = pool, bodies

    def make_routes(self) -> list[Route]:
        return [
            Route("/v1/eprt/instances", self.instances, methods=["GET", "POST"]),
            Route("/v1/eprt/instances/join", self.join, methods=["POST"]),
            Route("/v1/eprt/instances/{instance:str}", self.retire_instance, methods=["DELETE"]),
        ]

    async def instances(self, request: Request) -> Response:
        """Each instance: its role, state and load; and what was handed from one to another. POST: start one more."""
        fleet = self._fleet()
        if request.method == "POST":
            async with self._bodies.read(request) as body:
                await fleet.start_instance(*parse_start(body))
            return JsonResponse(instances_document(fleet), status_code=202)
        return JsonResponse(instances_document(fleet))

    async def join(self, request: Request) -> Response:
        """What `eprt join` of another host asks: a name, and where its ranks connect."""
        fleet = self._fleet()
        async with self._bodies.read(request) as body:
            answer = await fleet.invite(parse_join(body))
        return Response(msgspec.json.encode(answer), media_type="application/json")

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


def parse_join(body: bytes) -> FarJoinRequest:
    """ApiError for what `eprt join` does not send."""
    try:
        asked = msgspec.json.decode(body, type=FarJoinRequest)
    except msgspec.MsgspecError as error:
        raise ApiError(400, f"the body is not what `eprt join` sends: {error}", code="invalid_value") from None
    if asked.role not in ROLES:
        raise invalid("role", f"role={quoted(asked.role)}: must be {' or '.join(ROLES)}")
    if not 1 <= asked.ranks <= MOST_RANKS:
        raise invalid("ranks", f"ranks={asked.ranks}: must be in 1..{MOST_RANKS}")
    return asked


def parse_start(body: bytes) -> tuple[str, int | None]:
    """Role and ranks of {"role": "prefill", "ranks": 2}; None: as many as others of the role have. ApiError."""
    given = given_fields(body)
    for name in given:
        if name not in ("role", "ranks"):
            raise unsupported(shortened(name), f"unknown field {quoted(name)}; there are role and ranks")
    if "role" not in given:
        raise invalid("role", f"role is missing; give {' or '.join(ROLES)}", code="missing_required_parameter")
    role, ranks = given["role"], given.get("ranks")
    if role not in ROLES:
        raise invalid("role", f"role={quoted(role)}: must be {' or '.join(ROLES)}")
    if ranks is not None and (type(ranks) is not int or not 1 <= ranks <= MOST_RANKS):
        raise invalid("ranks", f"ranks={quoted(ranks)}: must be an integer in 1..{MOST_RANKS}")
    return role, ranks
