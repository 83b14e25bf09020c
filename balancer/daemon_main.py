"""`eprt balancer`: keeps the experts of a running server balanced, from beside it. docs/rebalancing.md."""

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

_REPEAT_S = 60.0  # a line at least so often where nobody watches a terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until told to stop: exit status 0. 2: a flag is wrong, or the server does not know the key."""
    arguments = _parser().parse_args(argv)
    try:
        server = RemoteServer(arguments.url, arguments.api_key)
        daemon = Daemon(server, _controller(arguments), arguments.interval, arguments.slow_ranks)
    except ValueError as error:
        print(f"eprt balancer: {error}", file=sys.stderr)
        return 2
    show = _Json() if arguments.json else _Lines(sys.stdout.isatty())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    decided = False
    try:
        while True:
            status = daemon.look()
            show(status)
            decided |= status.decision is not None
            if arguments.once and decided and status.state == "watching":
                return 0
            time.sleep(daemon.pause_s)
    except PermissionError as error:
        print(f"eprt balancer: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        job = "" if daemon.job_id is None else f"; the server goes on with migration {daemon.job_id}"
        print(
            f"\neprt balancer: stopped{job}" if sys.stdout.isatty() else f"eprt balancer: stopped{job}", file=sys.stderr
        )
        return 0
    except BrokenPipeError:  # whoever read the lines has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _stop(number: int, frame: object) -> None:
    for other in (signal.SIGTERM, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)  # it is leaving
    raise KeyboardInterrupt


def _controller(arguments: argparse.Namespace) -> Controller:
    if not arguments.interval > 0:
        raise ValueError(f"--interval {arguments.interval}: must be above 0")
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
        description="Watches the load of a running server's experts, plans better placements and has the server move "
        "to them while it serves. Waits for a server that is away or restarted; SIGTERM and Ctrl-C end it.",
    )
    add, defaults = parser.add_argument, TriggerConfig()
    add("--url", required=True, help="of the server, as it announced it: http://host:port")
    add("--api-key", metavar="KEY", help="the server's, if it was started with one")
    add("--interval", type=float, default=5.0, metavar="S", help="seconds between looks, default %(default)g")
    add("--json", action="store_true", help="one JSON object per look instead of lines")
    add("--dry-run", action="store_true", help="decide and say so; move nothing")
    add("--once", action="store_true", help="end after the first decision and what follows from it")
    add("--slow-ranks", action="store_true", help="less load for ranks that the server's diagnosis finds slow")
    add(
        "--max-moves-per-layer",
        type=int,
        metavar="N",
        help="slots of a layer that one plan may change, default 8 or more (docs/rebalancing.md)",
    )
    add("--hysteresis", type=float, default=defaults.hysteresis, metavar="X",
        help="what a plan saves must be X times its cost, default %(default)g")  # fmt: skip
    add("--min-gain", type=float, default=defaults.min_gain, metavar="X",
        help="and the busiest rank must lose this part of the mean load, or the network of what crosses between nodes, "
        "default %(default)g")  # fmt: skip
    add("--us-per-crossing", type=float, default=defaults.us_per_crossing, metavar="US",
        help="what a rank's network takes for one token to another node and back, default %(default)g; "
        "0: balance alone counts")  # fmt: skip
    add("--cooldown", type=float, default=defaults.cooldown_s, metavar="S",
        help="seconds to wait after a migration, default %(default)g")  # fmt: skip
    return parser


class _Json:
    def __call__(self, status: Status) -> None:
        print(json.dumps(status.to_json()), flush=True)


class _Lines:
    """On a terminal one line that is written anew, and kept where something has happened; elsewhere a line for what has
    happened or changed, and now and then one all the same."""

    def __init__(self, is_terminal: bool):
        self._is_terminal = is_terminal
        self._before: tuple = ()
        self._said_s = 0.0

    def __call__(self, status: Status) -> None:
        now_s, seen = time.monotonic(), (status.state, status.epoch, status.news)
        before, self._before = self._before, seen
        is_new = seen[:2] != before[:2] or (status.news and seen != before)
        if self._is_terminal:
            print(f"\r\x1b[K{status}", end="\n" if status.news and is_new else "", flush=True)
        elif is_new or now_s - self._said_s > _REPEAT_S:
            self._said_s = now_s
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {status}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
