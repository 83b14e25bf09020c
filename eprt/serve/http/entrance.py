"""Entrance: around all routes: the request id, keys, who may change the server, and the log of unknown errors.

Changes are POST requests under /v1/eprt. They need an admin key where the server has one; else they are taken from
processes of this host alone, and from no page in a browser there, whichever site the page came from. Knows no routes.
"""

import ipaddress
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response

from eprt.serve.anthropic.errors import error_document
from eprt.serve.errors import ApiError
from eprt.serve.http.responses import JsonResponse
from eprt.serve.keys import ServerKeys

_log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# A proxy on this host adds one of these: its clients are elsewhere. Only browsers send an origin.
_FROM_ELSEWHERE = (b"x-forwarded-for", b"x-real-ip", b"forwarded", b"origin")
# For probes, which bring no key.
OPEN_PATHS = frozenset(("/", "/health", "/ping", "/version", "/metrics"))
_READS = ("GET", "HEAD", "OPTIONS")

App = Callable[..., Awaitable[None]]


class Entrance:
    """An ASGI application in front of another one."""

    def __init__(self, app: App, keys: ServerKeys):
        self._app, self._keys = app, keys

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope["eprt.request_id"], scope["eprt.is_named"] = request_id, request_id == given

        async def send_with_id(message) -> None:
            if message["type"] == "http.response.start":
                name = scope["eprt.request_id"].encode("latin-1")  # the body may have given one
                message["headers"] = [*message["headers"], (b"x-request-id", name)]
            await send(message)

        scope["eprt.key_tier"] = self._keys.tier_name(_key_of(headers))
        if refusal := self._why_not(scope, headers):
            await error_response(refusal, scope)(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            _log.exception("[%s] %s %s: internal error", request_id, scope["method"], scope["path"])

    def _why_not(self, scope: dict[str, Any], headers: dict[bytes, bytes]) -> ApiError | None:
        path, key = scope["path"], _key_of(headers)
        if path in OPEN_PATHS:
            return None
        if not self._keys.opens_v1(key):
            return ApiError(401, "wrong or missing API key", code="invalid_api_key", kind="authentication_error")
        if not path.startswith("/v1/eprt") or scope["method"] in _READS or self._keys.opens_admin(key):
            return None
        if self._keys.admins:
            message = f"{scope['method']} {path} changes the server: it needs the admin key"
            return ApiError(403, message, code="admin_key_required", kind="permission_error")
        if not _is_of_this_host(scope, headers):
            message = (
                f"{scope['method']} {path} changes the server: only a process of the server's host may, as the server "
                "has no admin key (--admin-key-file, EPRT_ADMIN_KEY)"
            )
            return ApiError(403, message, code="local_only", kind="permission_error")
        return None


def _key_of(headers: dict[bytes, bytes]) -> str:
    """As OpenAI's clients send it, or Anthropic's."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        key = headers.get(b"x-api-key", b"")
    return key.strip().decode("latin-1")


def _is_of_this_host(scope: dict[str, Any], headers: dict[bytes, bytes]) -> bool:
    host, _ = scope.get("client") or ("", 0)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback and not any(name in headers for name in _FROM_ELSEWHERE)


def error_response(error: ApiError, scope: Mapping[str, Any]) -> Response:
    """In the shape that the path's clients expect."""
    headers = {"retry-after": str(error.retry_after_s)} if error.retry_after_s is not None else None
    path = scope["path"]
    is_anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
    body = error_document(error, scope["eprt.request_id"]) if is_anthropic else error.body()
    return JsonResponse(body, status_code=error.status, headers=headers)
