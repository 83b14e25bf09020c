"""Page: the answers to the page's requests: files, data and headers. Knows no sockets.

server.py serves it by itself, eprt.serve inside a running server.

GET index.html and the files of web/        GET api/overview, api/state
GET api/windows/{number|all}                 packed: the matrices of a window
GET api/timeline/{series}                    packed: a value per window and rank
GET api/ranks/{rank}                         one rank's series
GET api/links/{src}-{dst}                    how long rank src waited for rank dst, over time
GET api/usual                                packed: what was usual before
GET api/experts/{number|newest}              load, placement, migrations
GET api/instances                            eprt.instances/1, or null where a server is one group of ranks
GET api/events                               server-sent events: state, whenever it changes
POST api/mutes                               mutes a finding, or ends a mute: MuteChange.from_json
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..mutes import MuteChange
from .recording import ReadOnlyError, Recording

EVENTS, MUTES, INSTANCES = "api/events", "api/mutes", "api/instances"
EVENT_POLL_S, KEEP_ALIVE_S = 1.0, 15.0

_WEB = Path(__file__).parent / "web"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Scripts, styles and data come from here and from nowhere else; nobody may frame the page.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Reply(NamedTuple):
    """An answer to a request."""

    status: int
    media_type: str
    body: bytes


class Page:
    """All files are read at the start: a path that is not one of theirs is refused, whatever it contains."""

    def __init__(self, source: Recording):
        self._source = source
        self._files = {
            str(path.relative_to(_WEB).as_posix()): Reply(200, _TYPES[path.suffix], path.read_bytes())
            for path in _WEB.rglob("*")
            if path.suffix in _TYPES
        }
        self._files[""] = self._files["index.html"]
        self._data: dict[str, Callable[[str], Any]] = {
            "windows": lambda name: source.window(None if name == "all" else _parse_number(name)).pack(),
            "timeline": source.timeline,
            "ranks": lambda name: source.rank(_parse_number(name)),
            "links": lambda name: source.link(*_parse_pair(name)),
            "experts": lambda name: source.experts(None if name == "newest" else _parse_number(name)),
        }

    def reply(self, path: str) -> Reply:
        """path: below the page's own address, without a leading slash or a query."""
        if path in self._files:
            return self._files[path]
        if path == "api/overview":
            return _answer(self._source.overview())
        if path == "api/state":
            return _answer(self._source.state())
        if path == INSTANCES:
            return _answer(self._source.instances())
        if path == "api/usual":
            try:
                return _answer(self._source.usual())
            except LookupError:
                return _refusal("no window yet")
        api, _, rest = path.partition("/")
        kind, _, name = rest.partition("/")
        if api != "api" or kind not in self._data or not name:
            return _refusal("no such page")
        try:
            return _answer(self._data[kind](name))
        except LookupError:
            return _refusal(f"no such entry in {kind}")

    def change_mutes(self, body: bytes) -> Reply:
        """To a POST request."""
        try:
            change = MuteChange.from_json(body, time.time())
            if change.mute is not None:  # a mute from another time may end
                self._source.places().check(change.place)
            changed = self._source.change_mutes(change)
        except ReadOnlyError as error:
            return _refusal(str(error), 403, code="read_only", kind="permission_error")
        except ValueError as error:
            return _refusal(str(error), 400, code="invalid_value")
        except OSError as error:
            return _refusal(f"the mutes cannot be written: {error}", 500, code="not_written", kind="server_error")
        return _answer({"place": change.place, "muted_until": change.mute and change.mute.until, "changed": changed})

    def event(self) -> bytes:
        """The source's state as a server-sent event; the same bytes while nothing changes."""
        return b"data: " + json.dumps(self._source.state()).encode() + b"\n\n"


def _parse_number(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 16):
        raise LookupError(name)
    return int(name)


def _parse_pair(name: str) -> tuple[int, int]:
    src, dash, dst = name.partition("-")
    if not dash:
        raise LookupError(name)
    return _parse_number(src), _parse_number(dst)


def _answer(content: Any) -> Reply:
    if isinstance(content, bytes):
        return Reply(200, "application/octet-stream", content)
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    return Reply(200, "application/json", body)


def _refusal(message: str, status: int = 404, code: str = "not_found", kind: str = "invalid_request_error") -> Reply:
    """In the shape of every error of the server's API."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return Reply(status, "application/json", json.dumps({"error": error}).encode())
