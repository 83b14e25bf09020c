"""`python -m eprt.serve -n N`: starts mpirun and stands between the ranks and the signals.

mpirun answers SIGTERM and SIGINT by killing the ranks half a second later, with exit status 1, whatever its settings;
SIGUSR1 it passes on to them, but not everywhere: Open MPI 4.1, as Ubuntu 24.04 has it, was seen to notice no signal at
all. So this process takes SIGTERM and SIGINT and signals the ranks itself: they drain, and everything exits 0. A
second signal does not wait for the drain, a third kills. So does a server that does not end in time.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from eprt import env
from eprt.mpirun import mpirun_command
from eprt.serve.errors import say
from eprt.serve.options import OptionError, ServeOptions, make_diagnose_dir
from eprt.serve.ranks.channel import bind_http

# Beyond the drain: for the ranks to leave together, and for mpirun to notice.
_LEAVE_S = 60.0


def launch(options: ServeOptions, argv: list[str]) -> int:
    """Runs `python -m eprt.serve argv` on options.num_ranks ranks under mpirun; returns its exit status."""
    try:
        command = mpirun_command("-n", str(options.num_ranks), sys.executable, "-m", "eprt.serve", *argv)
    except FileNotFoundError as error:
        raise OptionError(str(error)) from None
    # Rank 0 does both for good; trying it here tells of a port in use without mpirun's words about a failed rank.
    bind_http(options.host, options.port).close()
    make_diagnose_dir(options)
    environment = {**env.mpi_environment(), "EPRT_LAUNCHER_PID": str(os.getpid())}
    started: list[subprocess.Popen] = []
    taken_s: list[float] = []
    told = False  # whether ranks of this host were

    def pass_on(number: int, frame) -> None:
        nonlocal told
        taken_s.append(time.monotonic())
        told = _end(started[0], hard=len(taken_s) > 2) if started else False

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    # Its own session: Ctrl-C in a terminal reaches this process only.
    mpirun = subprocess.Popen(command, env=environment, start_new_session=True)
    started.append(mpirun)
    allowed_s = options.drain_timeout_s + _LEAVE_S
    while (status := _wait(mpirun, 1.0)) is None:
        if taken_s and not told and _children(mpirun.pid):  # there were none yet, and nobody would tell them
            told = _end(mpirun, hard=False)
        if taken_s and time.monotonic() > taken_s[0] + allowed_s:
            say(f"eprt: not ended {allowed_s:g} s after it was told to stop: killing the ranks and mpirun")
            taken_s[0] += _LEAVE_S
            _end(mpirun, hard=True)
    # Told to stop while it loaded: there was nothing to drain. So young an mpirun may die of the signal itself.
    if taken_s and status in (128 + signal.SIGUSR1, -signal.SIGUSR1):
        return 0
    return status if status >= 0 else 128 - status


def _wait(process: subprocess.Popen, timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def _end(mpirun: subprocess.Popen, *, hard: bool) -> bool:
    """Tells the ranks of this host to drain, once more to hurry; or ends everything. Every rank: that is one signal.

    Returns whether this host has ranks.
    """
    ranks = _children(mpirun.pid)
    for pid in ranks:
        try:
            os.kill(pid, signal.SIGKILL if hard else signal.SIGUSR1)
        except ProcessLookupError:
            continue
    if hard:
        mpirun.kill()
    elif not ranks:  # all on other hosts, or not there yet
        mpirun.send_signal(signal.SIGUSR1)
    return bool(ranks)


def _children(parent: int) -> list[int]:
    """Processes that mpirun has started here and that serve; not its helpers on the way to other hosts."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            ppid = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if ppid == parent and b"\0eprt.serve\0" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except (OSError, ValueError):
            continue  # it has ended meanwhile
    return found
