"""How `eprt join` of another host asks the server, over HTTP, what its instance is to be (instances/far_joins.py).

Knows nothing of the processes that it starts then.
"""

import os
import socket
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
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            return msgspec.json.decode(answer.read(), type=FarJoinAnswer)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url}: {_words(error)}") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{url}: {getattr(error, 'reason', error)}") from None


def _words(error: urllib.error.HTTPError) -> str:
    """The server's, without what is around them."""
    body = error.read()
    try:
        return msgspec.json.decode(body)["error"]["message"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return f"status {error.code}: {body[:200].decode(errors='replace')}"
