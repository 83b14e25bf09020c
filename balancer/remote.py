"""RemoteServer: client for the load, placement and rebalancing endpoints of a running eprt server.

Knows the server's paths and documents, not when to ask for them. Needs only the standard library and numpy.
"""

import io
import json
import os
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from .controller import ServerSnapshot
from .placement import Placement
from .trace import RoutingTrace

_PLAN_TIMEOUT_S = 130.0  # a posted placement is answered after its migration is planned


class ServerUnreachableError(Exception):
    """The server does not answer or is not ready: a later retry may succeed."""


class ServerRefusedError(Exception):
    """The server refuses the request. status: of HTTP."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class RemoteServer:
    """One server. Every method raises ServerUnreachableError or ServerRefusedError with the reason.

    url: as the server announced it, http://host:port.
    api_key: what the server was started with, if any: its admin key to change it; default EPRT_ADMIN_KEY, EPRT_API_KEY.
    timeout_s: of every request, except that a posted placement is waited for longer.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 10.0):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url {url}: must begin with http:// or https://")
        try:
            parts = urlsplit(url)
            is_address = bool(parts.hostname) and parts.port != 0 and url.isprintable() and " " not in url
        except ValueError:
            is_address = False
        if not is_address:
            raise ValueError(f"--url {url!r}: must be the address of a server, as http://127.0.0.1:8000")
        self.url, self._api_key, self._timeout_s = (
            url.rstrip("/").removesuffix("/v1"),
            api_key or _key_of_environment(),
            timeout_s,
        )

    def load_snapshot(self) -> ServerSnapshot:
        """ValueError if the server has counted no load or its answer has another format."""
        return ServerSnapshot.from_json(self._get_json("/v1/eprt/load"))

    def placement(self) -> Placement:
        return Placement.from_json(self._get_json("/v1/eprt/placement"))

    def rebalancing(self) -> dict[str, Any]:
        """The state of the server's rebalancer, eprt.rebalance/1."""
        reply = self._get_json("/v1/eprt/rebalance")
        if reply.get("schema") != "eprt.rebalance/1":
            raise ServerRefusedError(200, "it does not answer as an eprt server of this version")
        return reply

    def post_placement(self, placement: Placement, rank_speeds: np.ndarray | None = None) -> dict[str, Any]:
        """Asks for a migration; eprt.rebalance/1. rank_speeds: the speeds that the placement was planned for."""
        body: dict[str, Any] = {"placement": placement.to_json()}
        if rank_speeds is not None:
            body["rank_speeds"] = rank_speeds.tolist()
        return self._get_json("/v1/eprt/rebalance", body)

    def rank_speeds(self) -> np.ndarray:
        """float64 [G]: the load that each rank can carry according to the diagnosis, relative to the others."""
        speeds = self._get_json("/v1/eprt/diagnose").get("rank_speeds")
        if not speeds:
            raise ServerRefusedError(200, "the answer has no rank_speeds; is the server of an older version?")
        return np.array(speeds, dtype=np.float64)

    def routing_sample(self) -> tuple[RoutingTrace, np.ndarray]:
        """The choices of the latest sampled tokens, and int64 [L, T]: the step that computed each token."""
        with np.load(io.BytesIO(self._request("/v1/eprt/load?format=npz"))) as data:
            return RoutingTrace(tuple(data["topk_idx"]), tuple(data["source_gpu"])), data["topk_step"]

    def _get_json(self, path: str, body: Any = None) -> dict[str, Any]:
        try:
            reply = json.loads(self._request(path, body))
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise ServerRefusedError(200, f"{path} does not answer as an eprt server")
        return reply

    def _request(self, path: str, body: Any = None) -> bytes:
        """The answer to a GET, or with a body to a POST."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        if self._api_key:
            request.add_header("authorization", f"Bearer {self._api_key}")
        try:
            # Proxies of the environment are not for a server in the same cluster.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            timeout_s = self._timeout_s if body is None else _PLAN_TIMEOUT_S
            with opener.open(request, timeout=timeout_s) as reply:
                return reply.read()
        except urllib.error.HTTPError as error:
            message = f"{path} answers {error.code}: {_error_message(error)}"
            if error.code == 401:
                message += "; --api-key gives the server's key"
            if error.code == 403:
                message += "; --api-key gives the server's admin key"
            if error.code in (502, 503, 504):
                raise ServerUnreachableError(message) from None
            raise ServerRefusedError(error.code, message) from None
        except (OSError, ValueError) as error:  # ValueError: bytes that are not HTTP
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ServerUnreachableError(f"no answer: {reason}; is a server running there?") from None
        except Exception as error:  # such as http.client's, if the server goes away in the middle of an answer
            raise ServerUnreachableError(f"it broke off: {error!r}") from None


def _error_message(error: urllib.error.HTTPError) -> str:
    """The message of an error in OpenAI's format, else HTTP's reason."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except Exception:
        return str(error.reason)


def _key_of_environment() -> str | None:
    return os.environ.get("EPRT_ADMIN_KEY") or os.environ.get("EPRT_API_KEY") or None
