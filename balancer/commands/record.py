"""eprt balance record: writes a running server's load and a sample of its routing to a file, window by window."""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..controller import ServerSnapshot
from ..formats import eprt_npz
from ..remote import RemoteServer, ServerAnswerError, ServerRefusedError, ServerUnreachableError
from ..trace import RoutingTrace
from . import options

_TIMEOUT_S = 30.0


def add_parser(commands) -> None:
    parser = commands.add_parser("record", help="record the load of a running server")
    add = parser.add_argument
    add("--url", required=True, help="the server's address, such as http://127.0.0.1:8000")
    add(
        "--api-key",
        metavar="KEY",
        help="the server's API key; default: EPRT_ADMIN_KEY, EPRT_API_KEY",
    )
    add("--out", required=True, type=Path, metavar="FILE", help="the .npz file to write")
    add("--windows", type=int, default=12, metavar="N", help="number of windows, default %(default)s")
    add("--window-s", type=float, default=10.0, metavar="S", help="seconds of a window, default %(default)s")
    add(
        "--tokens",
        type=int,
        default=1024,
        metavar="N",
        help="most tokens in the routing sample of a window, default %(default)s",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """After an interrupt (Ctrl-C) it writes the windows recorded so far."""
    server = RemoteServer(arguments.url, arguments.api_key, _TIMEOUT_S)
    try:
        return _record(server, arguments)
    except (ServerUnreachableError, ServerRefusedError, ServerAnswerError) as error:
        raise ValueError(f"{server.url}: {error}") from None


def _record(server: RemoteServer, arguments: argparse.Namespace) -> int:
    windows: list[np.ndarray] = []
    traces: list[RoutingTrace] = []
    before = server.load_snapshot()
    is_idle = False
    try:
        while len(windows) < arguments.windows:
            time.sleep(arguments.window_s)
            now = server.load_snapshot()
            if now.server_id != before.server_id:
                raise ValueError(f"the server was restarted after {len(windows)} windows: its load is of another run")
            load_LE = (now.tokens_PLE - before.tokens_PLE).sum(0).astype(np.float64)
            previous, before = before, now
            if not load_LE.any():
                if not is_idle:
                    options.print_status("the server is idle; waiting for requests (windows without load do not count)")
                is_idle = True
                continue
            is_idle = False
            trace = _sample(server, previous, now, len(windows))
            traces += [] if trace is None else [trace.sample(arguments.tokens, seed=len(windows))]
            windows.append(load_LE)
            options.print_status(f"window {len(windows)} of {arguments.windows}: {load_LE.sum():.0f} choices")
    except KeyboardInterrupt:
        options.print_status(f"interrupted after {len(windows)} windows")
    if not windows:
        raise ValueError("no window with load was recorded: the server was idle")
    trace = RoutingTrace.joined(traces) if traces else None
    eprt_npz.write(arguments.out, np.stack(windows), trace)
    num_tokens = 0 if trace is None else trace.num_tokens
    options.print_status(f"wrote {arguments.out}: {len(windows)} windows, {num_tokens} sampled tokens of each layer")
    return 0


def _sample(server: RemoteServer, before: ServerSnapshot, now: ServerSnapshot, window: int) -> RoutingTrace | None:
    """The sampled tokens computed between two snapshots; None before the server's own first window."""
    try:
        trace, step_LT = server.routing_sample()
    except ServerRefusedError as error:
        if error.status != 409:
            raise
        return None
    is_inside_LT = (step_LT > before.num_steps) & (step_LT <= now.num_steps)
    window_LT = np.where(is_inside_LT, window, -1)
    return replace(trace, window=tuple(window_LT)).in_windows(window, window + 1)
