"""How `eprt join` of another host asks the server, over HTTP, what its instance is to be (instances/far_joins.py).

Knows nothing of the processes that it starts then.
"""

import errno
import http.client
import os
import socket
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

import eprt
from eprt.serve.fingerprint import fingerprint
from eprt.serve.instances.far_joins import FarJoinAnswer, FarJoinRequest
from eprt.serve.options import RankConfig

_ANSWER_S = 10.0
# A link that comes up, or a neighbour that was not asked for its address yet, is a matter of seconds. A refusal is not:
# that host is there, and says so at once.
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
_AGAIN_S, _AGAIN_EVERY_S = 5.0, 0.5


def is_of_this_host(url: str) -> bool:
    """Whether the server listens at an address of this host's own. So do hosts whose name nobody knows: what is wrong
    with them is said where they are asked."""
    host = urlsplit(url).hostname or ""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
    except (OSError, UnicodeError):
        return True
    with socket.socket(family, kind) as sock:
        try:
            sock.bind(address)  # the system lets nobody have another host's address
        except OSError:
            return False
    return True


def ask_server(url: str, role: str, num_ranks: int, model_dir: str | None, api_key: str | None) -> RankConfig:
    """Of the instance's first rank, but for its board. model_dir: where the model is here; None: where the server has
    it. ValueError says why the server does not take it."""
    host = urlsplit(url).hostname
    mine = None if model_dir is None else fingerprint(model_dir)
    request = FarJoinRequest(role, num_ranks, eprt.__version__, socket.gethostname(), mine)
    answer = _post(f"{url.rstrip('/')}/v1/eprt/instances/join", request, api_key)
    config = answer.config
    place = model_dir or config.options.engine.model_dir
    if not (Path(place) / "config.json").is_file():
        raise ValueError(f"{url}: the server's model ({place}) is not at that place here; give its directory: --model")
    if answer.model not in ("", mine or fingerprint(place)):
        raise ValueError(f"{url}: {place} is another model here than on the server; give its directory: --model")
    options = replace(config.options, engine=replace(config.options.engine, model_dir=os.path.abspath(place)))
    at = answer.host or host or ""
    return msgspec.structs.replace(config, options=options, endpoint=f"tcp:{at}:{answer.port}")


def _post(url: str, question: FarJoinRequest, api_key: str | None) -> FarJoinAnswer:
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(url, msgspec.json.encode(question), headers, method="POST")
    give_up_s = time.monotonic() + _AGAIN_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                return msgspec.json.decode(answer.read(), type=FarJoinAnswer)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{url}: {_words(error)}") from None
        except msgspec.MsgspecError as error:
            raise ValueError(f"{url}: {error}") from None
        except urllib.error.URLError as error:
            reason = error.reason
            if getattr(reason, "errno", None) not in _UNREACHABLE or time.monotonic() > give_up_s:
                raise ValueError(f"{url}: {_why_unreachable(url, reason)}") from None
            time.sleep(_AGAIN_EVERY_S)
        except (OSError, http.client.HTTPException) as error:  # behind the connection
            why = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{url}: what listens there gives no answer of a server ({why}): is it http:// or https://, and is "
                "that its HTTP port?"
            ) from None


def _why_unreachable(url: str, reason: BaseException | str) -> str:
    """With what to look at."""
    at = urlsplit(url)
    why = (isinstance(reason, OSError) and reason.strerror) or reason
    if isinstance(reason, socket.gaierror):
        return f"no address is known here for {at.hostname} ({why}): check the name, or give an address"
    if isinstance(reason, ssl.SSLError):
        return f"{reason}: is it http:// or https://, and is the server's certificate known here?"
    if isinstance(reason, ConnectionRefusedError):
        port = at.port or (443 if at.scheme == "https" else 80)
        return (
            f"nothing of {at.hostname} takes connections at port {port} ({why}): is the server up, is that its HTTP "
            "port, and was it started with a --host that other hosts reach (0.0.0.0)?"
        )
    return (
        f"{at.hostname} cannot be reached from this host ({why}): is that host up, is the address right, and do "
        "routes and firewalls let this host through to its port?"
    )


def _words(error: urllib.error.HTTPError) -> str:
    """The server's, without what is around them."""
    body = error.read()
    try:
        return msgspec.json.decode(body)["error"]["message"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return f"status {error.code}: {body[:200].decode(errors='replace')}"
