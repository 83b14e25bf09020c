"""RemoteServer: a running eprt server over HTTP, as far as balancing goes. Standard library and numpy."""

import io
import json
import urllib.error
import urllib.request
from typing import Any

import numpy as np

from .controller import Snapshot
from .placement import Placement
from .trace import RoutingTrace

_TIMEOUT_S = 10.0
_PLAN_TIMEOUT_S = 130.0  # a posted placement is answered once its migration is planned


class UnreachableError(Exception):
    """Nobody answers, or only that it is not ready: trying again later may help."""


class RefusedError(Exception):
    """The server answers that it will not. status: of HTTP."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class RemoteServer:
    """url: as the server announced it, http://host:port. api_key: what it was started with, if any.

    Every method raises UnreachableError or RefusedError, saying who did and why.
    """

    def __init__(self, url: str, api_key: str | None = None):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url {url}: must begin with http:// or https://")
        self.url, self._api_key = url.rstrip("/").removesuffix("/v1"), api_key

    def load(self) -> Snapshot:
        """ValueError when there is no load, or no such server."""
        return Snapshot.from_json(self.json("/v1/eprt/load"))

    def placement(self) -> Placement:
        return Placement.from_json(self.json("/v1/eprt/placement"))

    def rebalancing(self) -> dict[str, Any]:
        """eprt.rebalance/1."""
        reply = self.json("/v1/eprt/rebalance")
        if reply.get("schema") != "eprt.rebalance/1":
            raise RefusedError(200, "it does not answer as an eprt server of this version")
        return reply

    def move_to(self, placement: Placement, rank_speeds: np.ndarray | None = None) -> dict[str, Any]:
        """Asks for a migration; eprt.rebalance/1. rank_speeds: what the placement was planned for."""
        body: dict[str, Any] = {"placement": placement.to_json()}
        if rank_speeds is not None:
            body["rank_speeds"] = rank_speeds.tolist()
        return self.json("/v1/eprt/rebalance", body, _PLAN_TIMEOUT_S)

    def rank_speeds(self) -> np.ndarray:
        """float64 [G]: what the diagnosis found each rank can carry; 1: as the others."""
        speeds = self.json("/v1/eprt/diagnose").get("rank_speeds")
        if not speeds:
            raise RefusedError(200, "the server tells no rank_speeds; is it of an older version?")
        return np.array(speeds, dtype=np.float64)

    def trace(self) -> RoutingTrace:
        """The routing sample of the latest tokens."""
        with np.load(io.BytesIO(self.get("/v1/eprt/load?format=npz"))) as data:
            return RoutingTrace(tuple(data["topk_idx"]), tuple(data["source_gpu"]))

    def json(self, path: str, body: Any = None, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
        """A path's answer, parsed; RefusedError where it is no JSON object."""
        try:
            reply = json.loads(self.get(path, body, timeout_s))
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise RefusedError(200, f"{path} does not answer as an eprt server")
        return reply

    def get(self, path: str, body: Any = None, timeout_s: float = _TIMEOUT_S) -> bytes:
        """A path's answer; with a body that of a POST."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        if self._api_key:
            request.add_header("authorization", f"Bearer {self._api_key}")
        try:
            # A proxy of the environment is for the world outside, never for the server beside.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=timeout_s) as reply:
                return reply.read()
        except urllib.error.HTTPError as error:
            message = f"{path} answers {error.code}: {_message(error)}"
            if error.code == 401:
                message += "; --api-key gives the server's key"
            if error.code in (502, 503, 504):
                raise UnreachableError(message) from None
            raise RefusedError(error.code, message) from None
        except (OSError, ValueError) as error:  # ValueError: bytes that are no HTTP
            reason = getattr(error, "reason", error)
            raise UnreachableError(f"no answer: {reason}; is a server running there?") from None
        except Exception as error:  # http.client's own: the server went away in the middle of an answer
            raise UnreachableError(f"it broke off: {error!r}") from None


def _message(error: urllib.error.HTTPError) -> str:
    """Of OpenAI's error shape, or the reason that HTTP gives."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except Exception:
        return str(error.reason)
