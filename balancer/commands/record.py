"""eprt balance record: a running server's load, window by window, and a sample of its routing, into a file."""

import argparse
import io
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

from ..formats import eprt_npz
from ..trace import RoutingTrace
from . import options

_TIMEOUT_S = 30.0


def add_parser(commands) -> None:
    parser = commands.add_parser("record", help="record the load of a running server")
    parser.add_argument("--url", required=True, help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="an .npz file")
    parser.add_argument("--windows", type=int, default=12, metavar="N", help="how many; default %(default)s")
    parser.add_argument("--window-s", type=float, default=10.0, metavar="S", help="length of each; default %(default)s")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Interrupted (Ctrl-C), it writes what it has."""
    if arguments.windows < 1 or not arguments.window_s > 0:
        raise ValueError(f"--windows {arguments.windows} --window-s {arguments.window_s}: both must be above 0")
    windows: list[np.ndarray] = []
    before = _counters(arguments.url)
    try:
        while len(windows) < arguments.windows:
            time.sleep(arguments.window_s)
            now = _counters(arguments.url)
            if now["server_id"] != before["server_id"]:
                raise ValueError(f"the server was restarted after {len(windows)} windows: its load is another run's")
            load_LE = _load(now) - _load(before)
            before = now
            if not load_LE.any():
                print(".", end="", file=sys.stderr, flush=True)  # idle: no window
                continue
            windows.append(load_LE)
            options.say(f"window {len(windows)} of {arguments.windows}: {load_LE.sum():.0f} choices")
    except KeyboardInterrupt:
        options.say(f"interrupted after {len(windows)} windows")
    if not windows:
        raise ValueError("no window with load was recorded: the server was idle")
    trace = _trace(arguments.url)
    eprt_npz.write(arguments.out, np.stack(windows), trace)
    options.say(f"wrote {arguments.out}: {len(windows)} windows, {trace.num_tokens} sampled tokens of each layer")
    return 0


def _get(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
            return response.read()
    except urllib.error.HTTPError as error:
        body = error.read().decode(errors="replace")
        try:
            body = json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            pass
        raise ValueError(f"{url}: {error.code}: {body}") from None
    except urllib.error.URLError as error:
        raise ValueError(f"{url}: {error.reason}; is a server running there?") from None


def _counters(url: str) -> dict:
    document = json.loads(_get(f"{url.rstrip('/')}/v1/eprt/load"))
    if not document.get("layers"):
        raise ValueError(f"{url}: the server counts no expert load (it is loading, or the model has no MoE layers)")
    return document


def _load(document: dict) -> np.ndarray:
    return np.array([layer["per_expert"] for layer in document["layers"]], dtype=np.float64)


def _trace(url: str) -> RoutingTrace:
    with np.load(io.BytesIO(_get(f"{url.rstrip('/')}/v1/eprt/load?format=npz"))) as data:
        return RoutingTrace(tuple(data["topk_idx"]), tuple(data["source_gpu"]))
