"""eprt diagnose DIR | --url URL: which rank or link is slow. Also `python -m eprt.diagnostics`."""

import argparse
import contextlib
import errno
import json
import os
import signal
import sys
import time
import webbrowser
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from .detect.analysis import METHODS
from .detect.report import Report, analyse
from .log.reader import no_usable_line, open_log
from .mutes import FILE_NAME, JobPlaces, Mute, MuteChange, MuteFile, check_place, mutes_beside, parse_until, with_mutes
from .page.log_source import LogSource, job_places
from .page.page import Page
from .page.server import DEFAULT_PORT, PageServer
from .page.server_source import Client, ServerError, ServerSource
from .text import to_text, wants_colour
from .windows.baseline import Baseline
from .windows.window_sums import WindowSums

_THIS_MACHINE = "127.0.0.1"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eprt diagnose",
        description="Shows which rank or link is slow, as a page for the browser (the default), as text or as JSON.",
        epilog="Exit status of --json and --text: 0 nothing that lasts, 1 something that lasts (with --ever: or did "
        "once), 2 the input cannot be read.",
    )
    parser.add_argument(
        "directory", metavar="DIR", nargs="?", help="directory with diagnose_rank*.log: a server's --diagnose-dir"
    )
    parser.add_argument("--url", help="a running server instead of a directory, such as http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="the API key of that server; default: EPRT_API_KEY")
    parser.add_argument(
        "--instance",
        metavar="NAME",
        default="",
        help="with --url, an instance of a server that has several; default: its only one",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object (eprt.findings/1)")
    form.add_argument("--text", action="store_true", help="print the findings and the wait matrix")
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="robust",
        help="with --json and --text on DIR: medians (robust, default), or mean and standard deviation (zscore)",
    )
    parser.add_argument(
        "--windows",
        metavar="A-B",
        type=_parse_windows,
        help="only these windows of DIR, by number: A-B, A- or A",
    )
    parser.add_argument(
        "--run", metavar="K", type=int, help="which run, from 1, if DIR holds several; default: the newest"
    )
    parser.add_argument("--ever", action="store_true", help="exit status 1 also for findings that are over")
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="colours of --text; default auto: on a terminal",
    )
    _add_past_flags(parser)
    _add_mute_flags(parser)
    _add_page_flags(parser)
    return parser


def _add_past_flags(parser: argparse.ArgumentParser) -> None:
    past = parser.add_argument_group("what to compare DIR with")
    past.add_argument(
        "--baseline", metavar="FILE", help="a good run, saved by --save-baseline; beside the run's own past"
    )
    past.add_argument(
        "--save-baseline",
        metavar="FILE",
        help="save what is usual in DIR (or in its --windows) as a baseline, and exit",
    )
    past.add_argument(
        "--topology", metavar="FILE", help="which ranks share a rack or half a node (eprt.topology/1); default: learned"
    )


def _add_page_flags(parser: argparse.ArgumentParser) -> None:
    page = parser.add_argument_group("the page")
    page.add_argument(
        "--port", type=int, help=f"port to listen on, default {DEFAULT_PORT}, or a free one if that is taken"
    )
    page.add_argument("--host", help=f"address to listen on, default {_THIS_MACHINE}: only this machine")
    page.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="one more host name under which browsers may ask for the page; may be repeated",
    )
    page.add_argument("--open", action="store_true", help="open the page in this machine's browser")


def _add_mute_flags(parser: argparse.ArgumentParser) -> None:
    mutes = parser.add_argument_group(
        "muting",
        "A muted finding is shown last and raises no alert. Mutes are in DIR/mutes.json; with --url in the server's "
        "--diagnose-dir, which needs its admin key as --api-key, or a process of its host.",
    )
    mutes.add_argument(
        "--mute", metavar="PLACE", type=_parse_place, help="column:3, row:3, point:2-6, hang:3, node:1 ..."
    )
    mutes.add_argument("--until", metavar="WHEN", help="2026-12-01, 2026-12-01T08:00 (UTC), 12h, 7d; with --mute")
    mutes.add_argument("--note", metavar="TEXT", default="", help="reason, with --mute; default: none")
    mutes.add_argument("--unmute", metavar="PLACE", type=_parse_place, help="end a mute")


def _parse_windows(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    try:
        numbers = (int(first), int(last)) if dash and last else (int(first), 1 << 62 if dash else int(first))
    except ValueError:
        numbers = 1, 0
    if numbers[0] > numbers[1]:
        raise argparse.ArgumentTypeError(f"{text}: must be A-B, A- or A, window numbers of which A is not the larger")
    return numbers


def _parse_place(text: str) -> str:
    try:
        return check_place(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _check_mutes(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if (arguments.mute is None) != (arguments.until is None):
        parser.error("--mute and --until belong together: a mute has an end")
    if arguments.note and not arguments.mute:
        parser.error("--note is the reason of a --mute")
    if arguments.mute and arguments.unmute:
        parser.error("--mute and --unmute: one at a time")
    aside = ("json", "text", "ever", "windows", "baseline", "save_baseline")
    if (arguments.mute or arguments.unmute) and (given := _given(arguments, aside)):
        parser.error(f"--{given} does nothing beside --mute and --unmute, which only change the mutes")


def _check_compared(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """What would be ignored is refused."""
    compared = ("run", "windows", "baseline", "save_baseline", "topology")
    if arguments.url and (given := _given(arguments, compared)):
        parser.error(f"--{given} is for DIR")
    if arguments.method == "robust":
        return
    if arguments.url or not (arguments.json or arguments.text):
        parser.error(f"--method {arguments.method} is for DIR, with --text or --json")
    if given := _given(arguments, ("baseline", "topology")):
        parser.error(f"--{given} is for --method robust: {arguments.method} compares ranks with each other alone")


def _check_form(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Flags of the page beside what shows none, and a server's key without a server."""
    forms = ("json", "text", "mute", "unmute", "save_baseline")
    if (form := _given(arguments, forms)) and (given := _given(arguments, ("port", "open", "host"))):
        parser.error(f"--{given} is for the page, which --{form} does not show")
    if form and arguments.allow_host:
        parser.error(f"--allow-host is for the page, which --{form} does not show")
    if arguments.api_key and not arguments.url:
        parser.error("--api-key is for --url")
    if arguments.save_baseline and (given := _given(arguments, ("json", "text", "ever"))):
        parser.error(f"--{given} does nothing beside --save-baseline, which only saves")


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> str:
    """The first flag of these that was given; empty: none."""
    return next((name.replace("_", "-") for name in names if getattr(arguments, name) not in (None, False)), "")


def _places(arguments: argparse.Namespace) -> JobPlaces:
    """Of the job whose log DIR is."""
    reader = open_log(arguments.directory, arguments.run)
    record = next((record for record, _ in reader.new_records()), None)
    if record is None:
        raise no_usable_line(arguments.directory, reader.problems())
    return job_places(record, arguments.topology)


def _change_mutes(arguments: argparse.Namespace) -> int:
    now_s, change = time.time(), MuteChange(arguments.unmute or arguments.mute, None)
    if arguments.mute:
        mute = Mute(arguments.mute, parse_until(arguments.until, now_s), arguments.note)
        change = MuteChange(mute.place, mute)
        if arguments.directory:  # a server knows its own job
            _places(arguments).check(mute.place)
    if arguments.url:
        changed = _client(arguments).change_mutes(change)
    else:
        changed = MuteFile(Path(arguments.directory) / FILE_NAME).change(change, now_s)
    if change.mute is None:
        print(f"eprt diagnose: {change.place} is {'not muted any more' if changed else 'not muted'}")
        return 0 if changed else 2
    until = datetime.fromtimestamp(change.mute.until, UTC)
    print(f"eprt diagnose: {change.place} is muted until {until:%Y-%m-%d %H:%M} UTC")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if (arguments.directory is None) == (arguments.url is None):
        parser.error("give either DIR or --url URL")
    if "" in (arguments.directory, arguments.url):
        parser.error("DIR or URL is empty")
    if arguments.instance and not arguments.url:
        parser.error("--instance is for --url: a server's --diagnose-dir has a folder for each instance")
    if arguments.port is not None and not 0 <= arguments.port <= 65535:
        parser.error(f"--port {arguments.port}: must be 0..65535")
    _check_compared(parser, arguments)
    _check_mutes(parser, arguments)
    _check_form(parser, arguments)
    try:
        if arguments.mute or arguments.unmute:
            return _change_mutes(arguments)
        if arguments.save_baseline:
            return _save_baseline(arguments)
        return _print_findings(arguments) if arguments.json or arguments.text else _serve(arguments)
    except (OSError, ValueError, ServerError) as error:
        print(f"eprt diagnose: {_reason(error)}", file=sys.stderr)
        return 2


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _save_baseline(arguments: argparse.Namespace) -> int:
    report = _analyse(arguments)
    baseline = Baseline.from_matrices(report.matrices)
    if not np.isfinite(baseline.wait_us_WNN).any():
        raise ValueError(f"{arguments.directory}: in these windows no rank waited for another: nothing to compare with")
    baseline.save(arguments.save_baseline)
    print(f"eprt diagnose: {arguments.save_baseline} has what is usual in {report.num_windows} windows")
    for finding in report.findings:
        print(f"eprt diagnose: not a good run to compare with: {finding.evidence}", file=sys.stderr)
    return 1 if report.findings else 0


def _analyse(arguments: argparse.Namespace) -> Report:
    return analyse(
        arguments.directory,
        arguments.method,
        run=arguments.run,
        windows=arguments.windows,
        baseline=arguments.baseline,
        topology=arguments.topology,
    )


def _client(arguments: argparse.Namespace) -> Client:
    return Client(arguments.url, arguments.api_key, arguments.instance)


def _print_findings(arguments: argparse.Namespace) -> int:
    matrices, problems = None, ()
    if not arguments.url:
        report = _analyse(arguments)
        findings, problems, matrices = report.to_json(), report.problems, report.matrices
        findings["findings"] = with_mutes(findings["findings"], mutes_beside(arguments.directory))
    elif arguments.json:
        findings = _client(arguments).findings()
    else:
        findings, records, problems = _client(arguments).windows(-1)
        matrices = WindowSums.from_records(records).matrices() if records else None
    for problem in problems:
        print(f"eprt diagnose: skipped: {problem}", file=sys.stderr)
    colour = wants_colour(sys.stdout, arguments.color)
    try:
        print(json.dumps(findings) if arguments.json else to_text(findings, matrices, colour=colour), flush=True)
    except BrokenPipeError:  # a reader that has seen enough (`| head`) does not change the exit status
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    awake = [finding for finding in findings["findings"] if finding.get("muted_until") is None]
    return int(any(arguments.ever or finding.get("active", True) for finding in awake))


def _serve(arguments: argparse.Namespace) -> int:
    if arguments.url:
        source = ServerSource(_client(arguments))
    else:
        source = LogSource(
            Path(arguments.directory), arguments.run, arguments.windows, arguments.baseline, arguments.topology
        )
    with contextlib.closing(source), _listen(Page(source), arguments) as server:
        print(f"eprt diagnose: page of {source.name} at {server.url}   (Ctrl-C ends)", flush=True)
        if arguments.host in (None, _THIS_MACHINE):
            forward = f"ssh -L {server.server_port}:127.0.0.1:{server.server_port} THIS-HOST"
            print(f"    from another machine: {forward}, then the same address", flush=True)
        if arguments.open:
            webbrowser.open(server.url)
        # A shell starts background jobs with SIGINT ignored; a SIGINT that is sent must still end this one.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # a second one does not wait for the pages
        server.closing = True
    return 0


def _listen(page: Page, arguments: argparse.Namespace) -> PageServer:
    port = DEFAULT_PORT if arguments.port is None else arguments.port
    host = _THIS_MACHINE if arguments.host is None else arguments.host
    allowed = tuple(arguments.allow_host)
    try:
        return PageServer(page, host, port, allowed)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and arguments.port is None:
            return PageServer(page, host, 0, allowed)
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


if __name__ == "__main__":
    sys.exit(main())
