"""`eprt balancer`: keeps the experts of a running server balanced from a separate process. docs/rebalancing.md.

Knows the command line, signals and the terminal; daemon.py does the work.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence

from .controller import Controller
from .daemon import Daemon, Status
from .remote import RemoteServer
from .trigger import TriggerConfig

_LONGEST_S = 1e9  # no system sleeps much longer at once
_REPEAT_S = 60.0  # without a terminal, a line at least this often


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until it is stopped: exit status 0. Status 2: a flag is wrong, or the server does not accept the key."""
    arguments = _parser().parse_args(argv)
    try:
        server = RemoteServer(arguments.url, arguments.api_key)
        daemon = Daemon(server, _controller(arguments), arguments.interval, arguments.slow_ranks)
    except ValueError as error:
        print(f"eprt balancer: {error}", file=sys.stderr)
        return 2
    printer = _LinePrinter(sys.stdout.isatty())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    decided = False
    try:
        while True:
            status = daemon.poll()
            if arguments.json:
                print(json.dumps(status.to_json()), flush=True)
            else:
                printer.show(status)
            decided |= status.decision is not None
            if arguments.once and decided and status.state == "watching":
                return 0
            time.sleep(daemon.pause_s)
    except PermissionError as error:
        print(f"eprt balancer: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        job = "" if daemon.job_id is None else f"; the server continues migration {daemon.job_id}"
        newline = "\n" if sys.stdout.isatty() else ""
        print(f"{newline}eprt balancer: stopped{job}", file=sys.stderr)
        return 0
    except BrokenPipeError:  # the reader of the lines has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _stop(number: int, frame: object) -> None:
    for other in (signal.SIGTERM, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)  # a second signal must not interrupt the exit
    raise KeyboardInterrupt


def _controller(arguments: argparse.Namespace) -> Controller:
    if not 0 < arguments.interval < _LONGEST_S:
        raise ValueError(f"--interval {arguments.interval}: must be above 0 and below {_LONGEST_S:g} seconds")
    if arguments.max_moves_per_layer is not None and arguments.max_moves_per_layer < 1:
        raise ValueError(f"--max-moves-per-layer {arguments.max_moves_per_layer}: must be at least 1")
    try:
        config = TriggerConfig(
            hysteresis=arguments.hysteresis,
            min_gain=arguments.min_gain,
            us_per_crossing=arguments.us_per_crossing,
            cooldown_s=arguments.cooldown,
            dry_run=arguments.dry_run,
        )
    except ValueError as error:
        raise ValueError(f"--{str(error).replace('_s=', '=').replace('_', '-').replace('=', ' ', 1)}") from None
    return Controller(config, arguments.max_moves_per_layer)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eprt balancer",
        description="Watches the load of a running server's experts, plans better placements and makes the server "
        "migrate to them while it serves. Waits for a server that is away or restarts; SIGTERM and Ctrl-C end it.",
    )
    add, defaults = parser.add_argument, TriggerConfig()
    add("--url", required=True, help="the server's address, such as http://127.0.0.1:8000")
    add(
        "--api-key",
        metavar="KEY",
        help="the server's admin key, or its API key for --dry-run; default: EPRT_ADMIN_KEY, EPRT_API_KEY",
    )
    add("--json", action="store_true", help="print one JSON object per poll, not lines")
    add("--dry-run", action="store_true", help="report decisions, but move nothing")
    add("--once", action="store_true", help="exit after the first decision and its migration")
    add("--slow-ranks", action="store_true", help="give less load to ranks that the server's diagnosis finds slow")
    text = "slots of a layer that one plan may change, default 8 or more (docs/rebalancing.md)"
    add("--max-moves-per-layer", type=int, metavar="N", help=text)
    for flag, default, metavar, text in (
        ("--interval", 5.0, "S", "seconds between polls"),
        ("--hysteresis", defaults.hysteresis, "X", "a plan must save X times its cost"),
        ("--min-gain", defaults.min_gain, "X", "and must save this fraction of the mean load or of the crossings"),
        (
            "--us-per-crossing",
            defaults.us_per_crossing,
            "US",
            "microseconds of network per token to another node and back; 0: plan for balance alone",
        ),
        ("--cooldown", defaults.cooldown_s, "S", "seconds to wait after a migration"),
    ):
        add(flag, type=float, default=default, metavar=metavar, help=f"{text}, default %(default)g")
    return parser


class _LinePrinter:
    """On a terminal, rewrites one line and keeps it if it has news. Elsewhere, prints a line for news and new states,
    and one every _REPEAT_S."""

    def __init__(self, is_terminal: bool):
        self._is_terminal = is_terminal
        self._before: tuple = ()
        self._printed_s = 0.0

    def show(self, status: Status) -> None:
        now_s, seen = time.monotonic(), (status.state, status.epoch, status.news)
        before, self._before = self._before, seen
        is_new = seen[:2] != before[:2] or (status.news and seen != before)
        if self._is_terminal:
            print(f"\r\x1b[K{status}", end="\n" if status.news and is_new else "", flush=True)
        elif is_new or now_s - self._printed_s > _REPEAT_S:
            self._printed_s = now_s
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {status}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
