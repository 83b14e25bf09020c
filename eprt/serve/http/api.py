"""Api: the HTTP routes and error bodies.

Knows nothing of who may call a route (entrance.py), of what a request means (openai/), of how load is balanced
(rebalance/) or of findings (diagnosis/).
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import eprt
from eprt.engine.request import RequestLimits
from eprt.serve.anthropic.face import MessageFace
from eprt.serve.diagnosis.diagnosis import Diagnosis
from eprt.serve.diagnosis.page import DiagnosisPage
from eprt.serve.errors import ApiError, invalid, shortened
from eprt.serve.group_services import GroupServices
from eprt.serve.http.bodies import LONG_BODY, Bodies
from eprt.serve.http.diagnosis_routes import DiagnosisRoutes
from eprt.serve.http.entrance import Entrance, error_response
from eprt.serve.http.instance_routes import InstanceRoutes
from eprt.serve.http.other_apis import refusal
from eprt.serve.http.responses import EventStream, JsonResponse, unless_disconnected
from eprt.serve.instances.document import group_document, instances_document
from eprt.serve.instances.fleet import Fleet
from eprt.serve.keys import NO_KEYS, ServerKeys
from eprt.serve.openai.answer import Answer
from eprt.serve.openai.extended_fields import ExtendedFields
from eprt.serve.openai.face import ChatFace, CompletionFace, Face
from eprt.serve.openai.logprobs import LogprobWriter
from eprt.serve.openai.prepare import Preparer
from eprt.serve.openai.tokenization import Tokenization
from eprt.serve.options import ServeOptions
from eprt.serve.ranks.pool import RankPool
from eprt.serve.responses.face import ResponseFace
from eprt.serve.tiers.table import TierTable

REQUEST_LOG = f"{__name__}.requests"  # the logger with a line for each request
_requests = logging.getLogger(REQUEST_LOG)
_RANK = re.compile("[0-9]{1,9}")  # Starlette's own converter fails on thousands of digits


class Api:
    """All endpoints of one server."""

    def __init__(
        self,
        options: ServeOptions,
        pool: RankPool | Fleet,
        preparer: Preparer,
        groups: Mapping[str, GroupServices],
        keys: ServerKeys = NO_KEYS,
    ):
        """groups: by instance, as they come and go; "": the server is one."""
        self._options, self._pool, self._preparer = options, pool, preparer
        self._groups, self._keys = groups, keys
        self._tokenization = Tokenization(preparer)
        self._completions, self._chat = CompletionFace(), ChatFace()
        self._responses, self._messages = ResponseFace(), MessageFace()
        self._bodies, self._reading = Bodies(options.max_body_bytes, options.body_timeout_s), asyncio.Lock()
        self._created = int(time.time())
        self._tiers = TierTable(options.tiers, options.default_tier)
        self.routes = self._make_routes()

    def app(self) -> Callable[..., Awaitable[None]]:
        """The ASGI application."""
        handlers = {ApiError: _api_error, HTTPException: _http_error, ClientDisconnect: _gone, Exception: _defect}
        return Entrance(Starlette(routes=self.routes, exception_handlers=handlers), self._keys)  # type: ignore[arg-type]

    def _make_routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/responses/{response:str}", self.response, methods=["GET", "DELETE"]),
            Route("/v1/responses/{response:str}/input_items", self.response_input),
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_message_tokens, methods=["POST"]),
            Route("/v1/eprt/load", self.load),
            Route("/v1/eprt/placement", self.placement),
            *DiagnosisRoutes(self._groups, self._group, self._bodies, self._make_page).routes,
            *InstanceRoutes(self._pool, self._bodies).make_routes(),
            Route("/v1/eprt/rebalance", self.rebalance, methods=["GET", "POST"]),
            Route("/v1/eprt/ranks", self.ranks),
            Route("/v1/eprt/ranks/{rank:str}/retire", self.retire, methods=["POST"]),
            Route("/", self.about),
        ]

    # -- generation --

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, self._completions)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, self._chat)

    async def responses(self, request: Request) -> Response:
        return await self._generate(request, self._responses)

    async def response(self, request: Request) -> Response:
        """One that is kept. DELETE: forget it."""
        store, response_id = self._responses.store, request.path_params["response"]
        if request.method == "DELETE":
            return JsonResponse(store.delete_response(response_id))
        return Response(store.response(response_id).document, media_type="application/json")

    async def response_input(self, request: Request) -> Response:
        return JsonResponse(self._responses.store.input_items(request.path_params["response"]))

    async def messages(self, request: Request) -> Response:
        return await self._generate(request, self._messages)

    async def count_message_tokens(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            return JsonResponse(await asyncio.to_thread(self._messages.count_tokens, self._preparer, body))

    async def _generate(self, request: Request, face: Face) -> Response:
        started_s = time.monotonic()
        request_id = request.scope["eprt.request_id"]
        try:
            async with self._bodies.read(request) as body:
                self._pool.check_open()
                limits = cast(RequestLimits, self._pool.limits)  # an open pool has them
                if len(body) < LONG_BODY:
                    parsed = face.parse(body)
                    request_id = _rename(request, parsed)
                    job = face.prepare(self._preparer, parsed, request_id, limits)
                else:
                    parsed = await self._parse_long(request, body, face.parse)
                    request_id = _rename(request, parsed)
                    job = await asyncio.to_thread(face.prepare, self._preparer, parsed, request_id, limits)
            job = job.with_tier(self._tiers, request.scope["eprt.key_tier"])
            if job.form is not None:
                check = self._preparer.forms.require(job.form)
                # A check may wait behind others, which take seconds each.
                await unless_disconnected(check, request.receive)
            generation = self._pool.submit(job.sequences, job.cache_key, job.tier)
        except ApiError as error:
            self._pool.metrics.observe_request(face.endpoint, error.code, started_s)
            _requests.info("[%s] %s %d %s: %s", request_id, face.endpoint, error.status, error.code, error.message)
            raise
        tokenizer = self._preparer.tokenizer
        answer = Answer(
            job, generation, tokenizer, face.writer(parsed, job, LogprobWriter(tokenizer, job.tokens_as_ids))
        )
        if job.stream:
            return EventStream(self._logged_events(answer, started_s))
        try:
            return JsonResponse(await unless_disconnected(answer.collect(), request.receive))
        finally:
            self._log_end(answer, started_s)

    async def _parse_long(self, request: Request, body: bytes, parse) -> Any:
        """parse(body) in a thread, so that other clients' streams keep flowing. One at a time: JSON decoders keep the
        interpreter to themselves, so several would be no faster and would leave the server's loop no turn."""
        async with self._reading:
            if await request.is_disconnected():
                raise ClientDisconnect
            return await asyncio.to_thread(parse, body)

    async def _logged_events(self, answer: Answer, started_s: float) -> AsyncIterator[bytes]:
        """The answer's events, with a log line and metrics however they end."""
        try:
            async with aclosing(answer.events()) as source:  # type: ignore[type-var]
                async for data in source:
                    yield data
        finally:
            self._log_end(answer, started_s)

    def _log_end(self, answer: Answer, started_s: float) -> None:
        job, usage = answer.job, answer.usage()
        self._pool.metrics.observe_request(job.endpoint, answer.outcome, started_s)
        _requests.info(
            "[%s] %s%s %s: prompt %d (cached %d), completion %d tokens, first token %s, total %.3f s%s%s",
            job.request_id,
            job.endpoint,
            " stream" if job.stream else "",
            answer.outcome,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            "none" if answer.first_token_s is None else f"{answer.first_token_s:.3f} s",
            time.monotonic() - started_s,
            (f", tier {job.tier.name}" if job.tier else "")
            + (f", moved {answer.num_moved} times" if answer.num_moved else ""),
            "".join(f", {name} {text!r}" for name, text in job.labels.items()),
        )

    # -- tokens --

    async def tokenize(self, request: Request) -> Response:
        return await self._on_tokens(request, self._tokenization.tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._on_tokens(request, self._tokenization.detokenize)

    async def _on_tokens(self, request: Request, answer: Callable[[bytes, RequestLimits], Any]) -> Response:
        self._pool.check_open()
        limits = self._pool.limits
        assert limits is not None
        async with self._bodies.read(request) as body:
            if len(body) < LONG_BODY:
                return JsonResponse(answer(body, limits))
            return JsonResponse(await self._parse_long(request, body, lambda body: answer(body, limits)))

    # -- models and health --

    def _model_card(self, name: str) -> dict[str, Any]:
        limits = self._pool.limits
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "eprt",
            "root": str(self._options.engine.model_dir),
            "parent": None,
            "max_model_len": limits.max_model_len if limits else None,
        }

    async def models(self, request: Request) -> Response:
        names = (self._options.model_name, *self._options.model_aliases)
        return JsonResponse({"object": "list", "data": [self._model_card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._preparer.check_model(name)
        return JsonResponse(self._model_card(name))

    async def about(self, request: Request) -> Response:
        """What this server is, for a person, and for clients that only look whether it answers."""
        paths = [route.path for route in request.app.routes if "{" not in route.path]
        return JsonResponse({"server": "eprt", "version": eprt.__version__, "paths": paths})

    async def version(self, request: Request) -> Response:
        return JsonResponse({"version": eprt.__version__})

    async def health(self, request: Request) -> Response:
        """200 while requests are served; else 503 with the reason, naming a rank where one is to blame."""
        pool = self._pool
        status, reason = ("ok", "") if pool.state == "serving" else (pool.state, pool.reason)
        hangs = [hang for group in self._groups.values() for hang in group.hangs()] if status == "ok" else []
        if hangs:
            status, reason = "degraded", "; ".join(hangs)
        elif stalled := pool.stalled_ranks():
            status = "stalled"
            reason = "; ".join(f"{rank} has work and has been silent for {pool.stall_s:g} s" for rank in stalled)
        ranks = [
            {"rank": number, "pid": r.pid, "host": r.host, "loaded": r.info is not None, "lost": r.lost}
            | ({"bytes_read": r.loading.num_bytes, "bytes_to_read": r.loading.num_total} if r.loading else {})
            for number, r in sorted(pool.ranks.items())
        ]
        document = {"status": status, "reason": reason, "num_ranks": pool.num_ranks, "ranks": ranks}
        return JsonResponse(document, status_code=200 if status == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._pool.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # -- instances --

    def _group(self, request: Request) -> GroupServices:
        """Of the instance that ?instance= or the path names; of the only one without."""
        name = request.path_params.get("instance") or request.query_params.get("instance", "")
        if name not in self._groups:
            there_are = ", ".join(sorted(filter(None, self._groups)))
            if there_are and not name:
                raise invalid("instance", f"this server has several instances: give ?instance=NAME, one of {there_are}")
            want = f"must be one of {there_are}" if there_are else "this server is one group of ranks; leave it out"
            raise invalid("instance", f"instance={name!r}: {want}")
        return self._groups[name]

    def _make_page(self, diagnosis: Diagnosis) -> DiagnosisPage:
        pool = self._pool
        document = partial(instances_document, pool) if isinstance(pool, Fleet) else partial(group_document, pool)
        return DiagnosisPage(diagnosis, lambda: pool.state == "serving", bool(self._keys.admins), document)

    # -- expert parallelism --

    async def load(self, request: Request) -> Response:
        """Tokens per rank, layer and expert since the start; with ?format=npz by windows, as a file."""
        wanted = request.query_params.get("format", "json")
        if wanted not in ("json", "npz"):
            raise invalid("format", f"format={wanted!r}: must be json or npz")
        rebalancer = self._group(request).rebalancer
        if wanted == "json":
            return JsonResponse(rebalancer.load_document())
        head = {"content-disposition": 'attachment; filename="load.npz"'}
        return Response(await rebalancer.load_file(), media_type="application/octet-stream", headers=head)

    async def placement(self, request: Request) -> Response:
        """Which logical expert each physical slot holds, in the shape of a placement file."""
        return JsonResponse(self._group(request).rebalancer.placement_document())

    async def rebalance(self, request: Request) -> Response:
        """GET: mode, the latest migration, decisions. POST: move to a placement, plan one, cancel, or set the mode."""
        rebalancer = self._group(request).rebalancer
        if request.method == "POST":
            async with self._bodies.read(request) as body:
                return JsonResponse(await rebalancer.post(body), status_code=202)
        return JsonResponse(rebalancer.status())

    async def ranks(self, request: Request) -> Response:
        """Each slot: its state, since when, and the process that has it."""
        return JsonResponse(self._group(request).pool.elasticity.document())

    async def retire(self, request: Request) -> Response:
        """Lets a rank leave; follow it with GET /v1/eprt/ranks."""
        self._pool.check_open()
        rank, elasticity = request.path_params["rank"], self._group(request).pool.elasticity
        if not _RANK.fullmatch(rank):
            raise ApiError(404, f"rank {shortened(rank)}: must be a rank's number", code="not_found")
        return JsonResponse(elasticity.retire(int(rank)), status_code=202)


def _rename(request: Request, parsed: Any) -> str:
    """The request's id: the header's, else that of the body, else one of its own."""
    own = parsed.own_request_id if isinstance(parsed, ExtendedFields) else None
    if own is not None and not request.scope["eprt.is_named"]:
        request.scope["eprt.request_id"] = own
    return request.scope["eprt.request_id"]


async def _api_error(request: Request, error: ApiError) -> Response:
    return error_response(error, request.scope)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Starlette's own: no such path, or not with this method."""
    path, method = request.url.path, request.method
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        if method == "OPTIONS":
            return Response(status_code=204, headers={"allow": allowed})
        message = f"{path} does not take {method}, only {allowed}"
        response = error_response(ApiError(405, message, code="method_not_allowed"), request.scope)
        response.headers["allow"] = allowed
        return response
    if other := refusal(path):
        return error_response(other, request.scope)
    there_are = ", ".join(route.path for route in request.app.routes if "{" not in route.path)
    message = f"nothing at {method} {path}; there are {there_are}"
    return error_response(ApiError(error.status_code, message, code="not_found"), request.scope)


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # nobody receives it


async def _defect(request: Request, error: Exception) -> Response:
    """Starlette sends this where nothing was sent yet, then raises the error again."""
    message = f"internal error; the log has request {request.scope['eprt.request_id']}"
    return error_response(ApiError(500, message, code="internal_error"), request.scope)
