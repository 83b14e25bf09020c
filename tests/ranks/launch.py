"""Runs a function on N MPI ranks from a pytest test, and shows the failing rank's traceback.

    run_ranks(4, "tests.ranks.cases_ep:round_trip", top_k=2)

starts `mpirun -n 4 python -m tests.ranks.launch ...`; every rank calls round_trip(group, top_k=2). A rank that raises
aborts the job; the test fails with everything the ranks printed. A job past its deadline is killed.
"""

import json
import subprocess
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from eprt import env
from eprt.mpirun import mpirun_command

ROOT = Path(__file__).resolve().parents[2]


# One thread for each of many ranks, and a deadline of their waits that no crowded machine reaches.
PATIENCE = {"OMP_NUM_THREADS": "1", "EPRT_TIMEOUT_S": "200"}


def mpirun(
    num_ranks: int, *arguments: str, extra_env: dict[str, str] | None = None, options: Sequence[str] = ()
) -> list[str]:
    """The command line that starts `python arguments` on num_ranks ranks. options: mpirun's own."""
    exports = [part for name in (extra_env or {}) for part in ("-x", name)]
    return mpirun_command(*options, "-n", str(num_ranks), *exports, sys.executable, *arguments)


def run_ranks(
    num_ranks: int, target: str, *, timeout_s: float = 600, extra_env: dict[str, str] | None = None, **kwargs
) -> str:
    """Calls target ("module:function") on every rank with (group, **kwargs); returns what was printed."""
    command = mpirun(num_ranks, "-m", "tests.ranks.launch", target, json.dumps(kwargs), extra_env=extra_env)
    environment = {**env.mpi_environment(), **PATIENCE, **(extra_env or {})}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        seen = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout
        raise AssertionError(
            f"{num_ranks} ranks of {target} did not finish in {timeout_s} s; they printed:\n{seen}"
        ) from None
    assert done.returncode == 0, (
        f"{num_ranks} ranks of {target} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


def main() -> None:
    target, kwargs = sys.argv[1], json.loads(sys.argv[2])
    from mpi4py import MPI

    from eprt import EPGroup

    module, function = target.split(":")
    try:
        group = EPGroup.from_mpi()
        getattr(import_module(module), function)(group, **kwargs)
        group.close()
    except BaseException:
        print(f"--- rank {MPI.COMM_WORLD.rank} ---\n{traceback.format_exc()}", flush=True)
        MPI.COMM_WORLD.Abort(1)


if __name__ == "__main__":
    main()
