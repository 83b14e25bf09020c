"""eprt balance record: a running server's load and a sample of its routing, window by window, into a file."""

import argparse
import io
import time
from pathlib import Path

import numpy as np

from ..formats import eprt_npz
from ..remote import RefusedError, RemoteServer, UnreachableError
from ..trace import RoutingTrace
from . import options

_TIMEOUT_S = 30.0


def add_parser(commands) -> None:
    parser = commands.add_parser("record", help="record the load of a running server")
    parser.add_argument("--url", required=True, help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="the server's, if it was started with one")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="an .npz file")
    parser.add_argument("--windows", type=int, default=12, metavar="N", help="how many; default %(default)s")
    parser.add_argument("--window-s", type=float, default=10.0, metavar="S", help="length of each; default %(default)s")
    parser.add_argument(
        "--tokens", type=int, default=1024, metavar="N", help="most sampled in a window; default %(default)s"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Interrupted (Ctrl-C), it writes what it has."""
    if arguments.windows < 1 or not arguments.window_s > 0:
        raise ValueError(f"--windows {arguments.windows} --window-s {arguments.window_s}: both must be above 0")
    if arguments.tokens < 0:
        raise ValueError(f"--tokens {arguments.tokens}: must be at least 0")
    server = RemoteServer(arguments.url, arguments.api_key)
    try:
        return _record(server, arguments)
    except (UnreachableError, RefusedError) as error:
        raise ValueError(f"{server.url}: {error}") from None


def _record(server: RemoteServer, arguments: argparse.Namespace) -> int:
    windows: list[np.ndarray] = []
    traces: list[RoutingTrace] = []
    before = _counters(server)
    is_idle = False
    try:
        while len(windows) < arguments.windows:
            time.sleep(arguments.window_s)
            now = _counters(server)
            if now["server_id"] != before["server_id"]:
                raise ValueError(f"the server was restarted after {len(windows)} windows: its load is another run's")
            load_LE = _load(now) - _load(before)
            steps = before["num_steps"], now["num_steps"]
            before = now
            if not load_LE.any():
                if not is_idle:
                    options.say("the server is idle; windows without load do not count")
                is_idle = True
                continue
            is_idle = False
            trace = _trace(server, *steps, window=len(windows))
            traces += [] if trace is None else [trace.sample(arguments.tokens, seed=len(windows))]
            windows.append(load_LE)
            options.say(f"window {len(windows)} of {arguments.windows}: {load_LE.sum():.0f} choices")
    except KeyboardInterrupt:
        options.say(f"interrupted after {len(windows)} windows")
    if not windows:
        raise ValueError("no window with load was recorded: the server was idle")
    trace = RoutingTrace.joined(traces) if traces else None
    eprt_npz.write(arguments.out, np.stack(windows), trace)
    num_tokens = 0 if trace is None else trace.num_tokens
    options.say(f"wrote {arguments.out}: {len(windows)} windows, {num_tokens} sampled tokens of each layer")
    return 0


def _counters(server: RemoteServer) -> dict:
    document = server.json("/v1/eprt/load", timeout_s=_TIMEOUT_S)
    if not document.get("layers"):
        raise ValueError("the server counts no expert load (it is loading, or the model has no MoE layers)")
    return document


def _load(document: dict) -> np.ndarray:
    return np.array([layer["per_expert"] for layer in document["layers"]], dtype=np.float64)


def _trace(server: RemoteServer, after_step: int, last_step: int, window: int) -> RoutingTrace | None:
    """The routing sample, as far as it was computed in these steps; None before the server's own first window."""
    try:
        file = server.get("/v1/eprt/load?format=npz", timeout_s=_TIMEOUT_S)
    except RefusedError as error:
        if error.status != 409:
            raise
        return None
    with np.load(io.BytesIO(file)) as data:
        step_LT = data["topk_step"]
        window_LT = np.where((step_LT > after_step) & (step_LT <= last_step), window, -1)
        return RoutingTrace(tuple(data["topk_idx"]), tuple(data["source_gpu"]), tuple(window_LT)).of_windows(
            window, window + 1
        )
