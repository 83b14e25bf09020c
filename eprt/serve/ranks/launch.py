"""Launcher of ranks that may span hosts: starts mpirun, and forwards signals to the ranks so that they drain.

mpirun answers SIGTERM and SIGINT by killing the ranks half a second later, with exit status 1, whatever its settings.
It forwards SIGUSR1 to them, but not everywhere: Open MPI 4.1, as Ubuntu 24.04 has it, was seen to react to no signal at
all. So this process catches SIGTERM and SIGINT and signals the ranks itself: they drain, and everything exits 0. A
second signal does not wait for the drain; a third one kills, and so does the launcher where the server does not end in
time. Knows nothing of what the ranks do.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from eprt import env
from eprt.mpirun import mpirun_command, on_this_host
from eprt.serve.certificate import check_certificate
from eprt.serve.device_check import check_device
from eprt.serve.errors import print_line
from eprt.serve.key_sources import read_keys
from eprt.serve.options import OptionError, ServeOptions, make_diagnose_dir
from eprt.serve.ranks.channel import bind_http, parent_of

# Beyond the drain: for the ranks to leave together, and for mpirun to notice.
_LEAVE_S = 60.0


def launch(options: ServeOptions, argv: list[str]) -> int:
    """Runs `python -m eprt.serve argv` on options.num_ranks ranks under mpirun; returns its exit status."""
    try:
        command = mpirun_command("-n", str(options.num_ranks), sys.executable, "-m", "eprt.serve", *argv)
    except FileNotFoundError as error:
        raise OptionError(str(error)) from None
    # Rank 0 does these again; trying them here reports a port in use without mpirun's words about a failed rank.
    read_keys(options)
    check_certificate(options)
    bind_http(options.host, options.port).close()
    make_diagnose_dir(options)
    one_host = not env.may_span_hosts()
    if one_host:
        check_device(options)
    environment = {**env.mpi_environment(one_host), "EPRT_LAUNCHER_PID": str(os.getpid())}
    environment = on_this_host(environment) if one_host else environment
    mpirun: subprocess.Popen | None = None
    caught_s: list[float] = []  # when signals came
    signalled = False  # whether ranks of this host were signalled

    def forward(number: int, frame) -> None:
        nonlocal signalled
        caught_s.append(time.monotonic())
        signalled = _end(mpirun, hard=len(caught_s) > 2) if mpirun else False

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    # Its own session: Ctrl-C in a terminal reaches this process only.
    mpirun = subprocess.Popen(command, env=environment, start_new_session=True)
    allowed_s = options.drain_timeout_s + _LEAVE_S
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = mpirun.wait(1.0)
            break
        if caught_s and not signalled and _children(mpirun.pid):  # ranks that started after the signal
            signalled = _end(mpirun, hard=False)
        if caught_s and time.monotonic() > caught_s[0] + allowed_s:
            print_line(f"eprt: not ended {allowed_s:g} s after it was told to stop: killing the ranks and mpirun")
            caught_s[0] += _LEAVE_S
            _end(mpirun, hard=True)
    # Told to stop while it loaded: there was nothing to drain, and mpirun may die of the signal before it handles it.
    if caught_s and status in (128 + signal.SIGUSR1, -signal.SIGUSR1):
        return 0
    if status < 0 and not caught_s:
        print_line(f"eprt: mpirun (pid {mpirun.pid}) was lost: killed by signal {-status}; the ranks drain and stop")
    if status == 1 and not caught_s:
        why = "a rank did, as told above, or mpirun was told to stop"
        print_line(f"eprt: mpirun (pid {mpirun.pid}) has ended with status 1: {why}")
    return status if status >= 0 else 128 - status


def _end(mpirun: subprocess.Popen, *, hard: bool) -> bool:
    """Signals this host's ranks to drain (a second time: to hurry), or kills all. Returns whether there are any."""
    ranks = _children(mpirun.pid)
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if hard else signal.SIGUSR1)
    if hard:
        mpirun.kill()
    elif not ranks:  # all are on other hosts, or not started yet
        mpirun.send_signal(signal.SIGUSR1)
    return bool(ranks)


def _children(parent: int) -> list[int]:
    """Processes that mpirun has started on this host and that serve; not its helpers that reach other hosts."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            if parent_of(int(path.name)) == parent and b"\0eprt.serve\0" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found
