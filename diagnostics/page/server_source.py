"""ServerSource: a recording of a running server, over HTTP. Knows the server's replies, and nothing of its inside."""

import http.client
import json
import logging
import os
import threading
import urllib.error
import urllib.request
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlsplit

from ..log.events import WindowRecord
from ..mutes import MuteChange
from .kept_source import KeptSource
from .recording import ReadOnlyError

_log = logging.getLogger(__name__)
_POLL_S = 3.0
_TIMEOUT_S = 20.0
_MOST_WINDOWS = 360  # an hour, as far as this process has seen it; the server itself remembers ten minutes
_MUTES = "/v1/eprt/diagnose/mutes"
_LATE_WINDOWS = 2  # for how many windows the lines of late ranks are asked for again
# Types of the fields of eprt.findings/1, and of each finding.
_REPLY_TYPES = {"num_ranks": int, "windows": int, "findings": list}
_FINDING_TYPES = dict.fromkeys(("kind", "cause", "evidence", "advice"), str) | {
    **dict.fromkeys(("score", "ratio", "confidence"), (int, float)),
    **dict.fromkeys(("first_window", "last_window"), int),
}


class ServerError(Exception):
    """The server could not be asked. Says which and why, and what to do. status: of its answer; 0: there is none."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class Client:
    """Asks the server.

    Args:
        url: as the server announced it, http://host:port.
        instance: of a server of several: whose diagnosis; "": the server is one group of ranks.
    """

    def __init__(self, url: str, api_key: str | None = None, instance: str = ""):
        if not url.startswith(("http://", "https://")):
            raise ServerError(f"--url {url}: must begin with http:// or https://")
        if not _is_address(url):
            raise ServerError(f"--url {url!r}: must be the address of a server, as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._instance = f"instance={quote(instance, safe='')}" if instance else ""
        self._api_key = api_key or os.environ.get("EPRT_API_KEY") or None
        if not (self._api_key or "").isascii() or not (self._api_key or "").isprintable():
            raise ServerError("--api-key, EPRT_API_KEY: must be printable ASCII")

    def get(self, path: str) -> Any:
        """Parsed JSON. ServerError when there is none."""
        return self._ask(urllib.request.Request(self.url + path, headers={"accept": "application/json"}))

    def change_mutes(self, change: MuteChange) -> bool:
        """False for the end of a mute that is none. ServerError with the server's reason."""
        fields: dict[str, Any] = {"place": change.place, "until": None}
        if change.mute is not None:
            until = datetime.fromtimestamp(change.mute.until, UTC).isoformat()
            fields |= {"until": until, "note": change.mute.note}
        headers = {"accept": "application/json", "content-type": "application/json"}
        reply = self._ask(
            urllib.request.Request(self.url + self._of_instance(_MUTES), json.dumps(fields).encode(), headers)
        )
        if not isinstance(reply, dict) or not isinstance(reply.get("changed"), bool):
            raise ServerError(f"{self.url}{_MUTES} is not an answer of an eprt server: it says nothing of changed")
        return reply["changed"]

    def _of_instance(self, path: str) -> str:
        return f"{path}{'&' if '?' in path else '?'}{self._instance}" if self._instance else path

    def _ask(self, request: urllib.request.Request) -> Any:
        if self._api_key:
            request.add_header("authorization", f"Bearer {self._api_key}")
        try:
            # A proxy of the environment is for other networks, not for a server that is being debugged.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=_TIMEOUT_S) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            remedy = "; --api-key gives the server's key" if error.code == 401 else _said_in(error)
            raise ServerError(f"{request.full_url} answers {error.code} {error.reason}{remedy}", error.code) from None
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:  # or no HTTP, or no JSON
            reason = getattr(error, "reason", error)
            raise ServerError(f"{request.full_url} cannot be read: {reason}") from None

    def findings(self) -> dict[str, Any]:
        """eprt.findings/1 of the last ten minutes of work."""
        reply = self._checked(self.get(self._of_instance("/v1/eprt/diagnose")))
        reply.pop("records", None)
        return reply

    def windows(self, since: int) -> tuple[dict[str, Any], list[WindowRecord], list[str]]:
        """Findings, the records of the windows after `since` (-1: all that the server remembers), and problems."""
        reply = self.get(self._of_instance(f"/v1/eprt/diagnose?since={since}"))
        lines = reply.pop("records", None) if isinstance(reply, dict) else None
        if not isinstance(lines, list):
            raise ServerError(f"{self.url} does not send its windows; is it an older version?")
        records, problems = [], []
        for line in lines:
            try:
                records.append(WindowRecord.from_line(json.dumps(line)))
            except ValueError as error:
                problems.append(f"{self.url}: {error}")
        return self._checked(reply), records, problems

    def _checked(self, reply: Any) -> dict[str, Any]:
        """The reply, or ServerError with what it lacks of eprt.findings/1."""
        what = f"{self.url}/v1/eprt/diagnose is not an answer of an eprt server"
        if not isinstance(reply, dict) or reply.get("schema") != "eprt.findings/1":
            raise ServerError(f"{what}: it has no schema eprt.findings/1")
        findings = reply.get("findings")
        each = enumerate(findings) if isinstance(findings, list) else ()
        parts = [("", reply, _REPLY_TYPES), *((f"findings[{i}].", finding, _FINDING_TYPES) for i, finding in each)]
        for place, fields, types in parts:
            for name, kind in types.items():
                if not isinstance(fields, dict) or not isinstance(fields.get(name), kind):
                    got = fields.get(name) if isinstance(fields, dict) else fields
                    raise ServerError(f"{what}: {place}{name} is {json.dumps(got)[:80]}")
        return reply


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0 and url.isprintable() and " " not in url
    except ValueError:  # brackets, a port that is none
        return False


def _said_in(error: urllib.error.HTTPError) -> str:
    """The message in the shape of the server's errors, with the flag to mend it; empty where there is none."""
    try:
        said = json.load(error)["error"]
        return f": {said['message']}{'; here by --instance NAME' if said.get('param') == 'instance' else ''}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


class ServerSource(KeptSource):
    """ServerError when the server cannot be asked at the start; later errors are shown, and asking goes on."""

    def __init__(self, client: Client):
        self._client, self._has_instances = client, True
        findings, records, problems = client.windows(-1)
        super().__init__(client.url, int(findings["num_ranks"]), _MOST_WINDOWS)
        self.add_records(records)
        self.set_findings(findings, problems)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="eprt-server-reader", daemon=True)
        self._thread.start()

    def why_read_only(self) -> str:
        with self.lock:
            return (self._findings or {}).get("mute_refusal", "the server is of a version that mutes by a file only")

    def change_mutes(self, change: MuteChange) -> bool:
        try:
            changed = self._client.change_mutes(change)
            self._catch_up()
        except ServerError as error:
            raise ReadOnlyError(str(error)) from None
        return changed

    def instances(self) -> dict[str, Any] | None:
        if not self._has_instances:
            return None
        try:
            return self._client.get("/v1/eprt/instances")
        except ServerError as error:
            self._has_instances = error.status != 404
            return None

    def close(self) -> None:
        self._stop.set()

    def _follow(self) -> None:
        while not self._stop.wait(_POLL_S):
            try:
                self._catch_up()
            except ServerError as error:
                self.set_findings(self.overview()["findings"], trouble=str(error))
            except Exception as error:
                _log.warning("%s: %s", self.name, error)

    def _catch_up(self) -> None:
        newest = max(self.history.windows(), default=-1)
        findings, records, problems = self._client.windows(max(-1, newest - _LATE_WINDOWS))
        if records and records[0].num_ranks != self.num_ranks:
            raise ServerError(f"{self.name} now has {records[0].num_ranks} ranks; start `eprt diagnose` again")
        before = self.overview()
        self.add_records(records)
        if findings != before["findings"] or before["trouble"] or problems:
            self.set_findings(findings, problems)
