"""RemoteServer: client for the load, placement and rebalancing endpoints of a running eprt server.

Knows the server's paths and documents, not when to ask for them. Whatever an answer holds is checked by type here, so
that nobody else meets it in another form. Needs only the standard library and numpy.
"""

import io
import json
import os
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np

from .checks import NUMBER, check_fields
from .controller import NoLoadError, ServerSnapshot
from .placement import Placement
from .trace import RoutingTrace

_PLAN_TIMEOUT_S = 130.0  # a posted placement is answered after its migration is planned
_STATE = {"server_id": str, "mode": str, "state": str, "epoch": int}
_MIGRATION = {"job_id": int, "state": str, "reason": str, "rounds_done": int, "num_rounds": int, "seconds": NUMBER}
_SAMPLE = {"topk_idx": 3, "source_gpu": 2, "topk_step": 2}  # dimensions of each array

T = TypeVar("T")


class ServerUnreachableError(Exception):
    """The server does not answer or is not ready: a later retry may succeed."""


class ServerRefusedError(Exception):
    """The server refuses the request. status: of HTTP."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class ServerAnswerError(Exception):
    """The server answers, but not in the form of an eprt server of this version."""


class RemoteServer:
    """One server. Every method raises ServerUnreachableError, ServerRefusedError or ServerAnswerError with the reason.

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
        if self._api_key and not (self._api_key.isascii() and self._api_key.isprintable()):
            raise ValueError("--api-key, EPRT_ADMIN_KEY, EPRT_API_KEY: a key must be printable ASCII")

    def load_snapshot(self) -> ServerSnapshot:
        """NoLoadError if the server has counted no load yet."""
        return self._decoded("/v1/eprt/load", ServerSnapshot.from_json)

    def placement(self) -> Placement:
        return self._decoded("/v1/eprt/placement", Placement.from_json)

    def rebalancing(self) -> dict[str, Any]:
        """The state of the server's rebalancer, eprt.rebalance/1."""
        return self._decoded("/v1/eprt/rebalance", _rebalancing)

    def post_placement(self, placement: Placement, rank_speeds: np.ndarray | None = None) -> dict[str, Any]:
        """Asks for a migration; eprt.rebalance/1, with that migration. rank_speeds: the speeds that the placement was
        planned for."""
        body: dict[str, Any] = {"placement": placement.to_json()}
        if rank_speeds is not None:
            body["rank_speeds"] = rank_speeds.tolist()
        return self._decoded("/v1/eprt/rebalance", _posted, body)

    def rank_speeds(self) -> np.ndarray:
        """float64 [G]: the load that each rank can carry according to the diagnosis, relative to the others."""
        return self._decoded("/v1/eprt/diagnose", _rank_speeds)

    def routing_sample(self) -> tuple[RoutingTrace, np.ndarray]:
        """The choices of the latest sampled tokens, and int64 [L, T]: the step that computed each token."""
        path = "/v1/eprt/load?format=npz"
        data = self._request(path)
        try:
            return _sample(data)
        except ValueError as error:
            raise ServerAnswerError(f"{path}: {error}") from None

    def _decoded(self, path: str, decode: Callable[[dict[str, Any]], T], body: Any = None) -> T:
        answer = self._get_json(path, body)
        try:
            return decode(answer)
        except NoLoadError:
            raise
        except ValueError as error:
            raise ServerAnswerError(f"{path}: {error}") from None

    def _get_json(self, path: str, body: Any = None) -> dict[str, Any]:
        try:
            reply = json.loads(self._request(path, body))
        except (ValueError, RecursionError):  # RecursionError: brackets without end
            reply = None
        if not isinstance(reply, dict):
            raise ServerAnswerError(f"{path} does not answer as an eprt server")
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


# What each document must hold; ValueError if it does not.


def _rebalancing(data: dict[str, Any]) -> dict[str, Any]:
    if data.get("schema") != "eprt.rebalance/1":
        raise ValueError("it does not answer as an eprt server of this version")
    check_fields(data, "the answer", {**_STATE, "migration": dict | None})
    migration = data["migration"]
    if migration is not None:
        check_fields(migration, "the migration", {**_MIGRATION, "moves": dict})
        check_fields(migration["moves"], "its moves", dict.fromkeys(migration["moves"], int))
    return data


def _posted(data: dict[str, Any]) -> dict[str, Any]:
    if _rebalancing(data)["migration"] is None:
        raise ValueError("the answer to a placement has no migration")
    return data


def _rank_speeds(data: dict[str, Any]) -> np.ndarray:
    speeds = data.get("rank_speeds")
    if not speeds or not isinstance(speeds, list):
        raise ValueError("the answer has no rank_speeds; is the server of an older version?")
    by_rank = {str(rank): speed for rank, speed in enumerate(speeds)}
    check_fields(by_rank, "rank_speeds", dict.fromkeys(by_rank, NUMBER))
    return np.array(speeds, dtype=np.float64)


def _sample(data: bytes) -> tuple[RoutingTrace, np.ndarray]:
    damage = (ValueError, LookupError, EOFError, OSError, MemoryError, zipfile.BadZipFile, zlib.error)
    try:
        with zipfile.ZipFile(io.BytesIO(data)):  # numpy would take other kinds of files, too
            pass
        with np.load(io.BytesIO(data)) as file:
            arrays = {name: file[name] for name in _SAMPLE}
    except damage as error:
        raise ValueError(f"not a file of {', '.join(_SAMPLE)}: {error}") from None
    for name, array in arrays.items():
        if array.ndim != _SAMPLE[name] or array.dtype.kind not in "iu":
            raise ValueError(f"{name} has shape {array.shape} and dtype {array.dtype}")
    topk_LTK, source_LT, step_LT = arrays.values()
    if step_LT.shape != source_LT.shape:
        raise ValueError(f"topk_step has shape {step_LT.shape}, source_gpu {source_LT.shape}")
    return RoutingTrace(tuple(topk_LTK), tuple(source_LT)), step_LT


def _error_message(error: urllib.error.HTTPError) -> str:
    """The message of an error in OpenAI's format, else HTTP's reason."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except Exception:
        return str(error.reason)


def _key_of_environment() -> str | None:
    return os.environ.get("EPRT_ADMIN_KEY") or os.environ.get("EPRT_API_KEY") or None
