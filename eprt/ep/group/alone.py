"""MPI in a process that no launcher has started, or whose ranks are on one host: nothing listens, nothing is left.

Open MPI keeps a directory in TMPDIR and a shared segment for each such process, which nobody removes. Knows nothing of
groups.
"""

import atexit
import os
import shutil
import sys
import tempfile

from eprt import env


def load_mpi() -> None:
    """To be called before the first import of mpi4py.MPI, which starts MPI."""
    if "mpi4py.MPI" in sys.modules:
        return
    if env.launched_rank() is not None:
        env.close_ranks_ports()
        return
    folder = tempfile.mkdtemp(prefix="eprt-mpi-")
    try:
        with env.of_lone_process(folder):
            import mpi4py.MPI  # noqa: F401
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    atexit.register(_end, folder, os.getpid())


def _end(folder: str, pid: int) -> None:
    """mpi4py would end MPI too late to clean up behind it."""
    if os.getpid() != pid:  # a fork
        return
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()
    shutil.rmtree(folder, ignore_errors=True)
