"""A process by itself that asks MPI for its group leaves nothing behind; neither it nor ranks of one host listen."""

import os
import subprocess
import sys
from pathlib import Path

from eprt import env
from eprt.mpirun import mpirun_command
from tests.ranks.shared_files import is_of_no_process
from tests.serve.processes import wait_until

ALONE = """
import psutil
from eprt import EPGroup
group = EPGroup.from_mpi()
window = group.shared_window(1 << 16)
window.segments[0][:] = 1
listening = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
print(group.size, len(listening))
group.close()
"""


def test_one_process_leaves_no_file_and_listens_nowhere(tmp_path):
    marks = ("OMPI_", "PMIX_", "PMI_", "PRTE_")
    variables = {k: v for k, v in os.environ.items() if not k.startswith(marks)} | {"TMPDIR": str(tmp_path)}
    before = set(Path("/dev/shm").iterdir())
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables, text=True
    )
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0 and out.split() == ["1", "0"], (out, error)
    # Open MPI names its segments by a number of the job, and other tests make some meanwhile.
    new = set(Path("/dev/shm").iterdir()) - before
    wait_until(lambda: not [path for path in new if is_of_no_process(path)], f"an end of what is left of {new}")
    assert not list(tmp_path.iterdir())


RANKS = """
import psutil
from eprt import EPGroup
group = EPGroup.from_mpi()
listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
told = group.allgather(listening)
if group.rank == 0:
    print(told)
group.close()
"""


def test_ranks_of_one_host_do_not_listen():
    variables = {k: v for k, v in env.mpi_environment().items() if k != "OMPI_MCA_btl"}
    command = mpirun_command("-n", "2", sys.executable, "-c", RANKS)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[[], []]"), done.stderr
