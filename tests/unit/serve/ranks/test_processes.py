"""How a rank's process and the frontend's get their configuration, descriptors and environment."""

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from eprt.serve.flags import parse_options
from eprt.serve.options import FrontendConfig, RankConfig
from eprt.serve.ranks import processes
from tests.unit.cases import MODEL

# In place of Python: keeps its arguments, standard input, environment and open descriptors.
SAVE = '#!/bin/sh\ncd {folder}; echo "$@" > arguments; cat > config; env > variables; ls /proc/self/fd > fds\n'


@pytest.fixture
def saved(tmp_path, monkeypatch) -> Path:
    program = tmp_path / "python"
    program.write_text(SAVE.format(folder=tmp_path))
    program.chmod(stat.S_IRWXU)
    monkeypatch.setattr(processes, "sys", SimpleNamespace(executable=str(program)))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("EPRT_TIMEOUT_S", "1")
    monkeypatch.setenv("EPRT_CPU_ISA", "scalar")
    return tmp_path


def variables(folder: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (folder / "variables").read_text().splitlines() if "=" in line)


OPTIONS = parse_options(["--model", str(MODEL), "--skip-tokenizer-init", "-n", "2", "--max-body-mb", "3"])


def test_a_rank_has_the_board_and_the_servers_variables(saved):
    fd = os.memfd_create("board")
    config = RankConfig(OPTIONS, 1, 2, fd, "unix:x", "secret", 7, True, {"EPRT_TIMEOUT_S": "99"})
    process = processes.start_rank(config)
    assert process.wait(200) == 0 and os.getsid(0) != process.pid
    os.close(fd)
    assert (saved / "arguments").read_text() == "-m eprt.serve.ranks 1\n"
    assert msgspec.json.decode((saved / "config").read_bytes(), type=RankConfig) == config
    assert str(fd) in (saved / "fds").read_text().split()
    seen = variables(saved)
    assert seen["EPRT_TIMEOUT_S"] == "99" and "EPRT_CPU_ISA" not in seen and "OMPI_COMM_WORLD_RANK" not in seen


def test_the_frontend_has_its_sockets_and_no_mpi(saved):
    reader, writer = os.pipe()
    config = FrontendConfig(OPTIONS, 2, "secret", reader, writer)
    assert processes.start_frontend(config).wait(200) == 0
    assert (saved / "arguments").read_text() == "-m eprt.serve.frontend\n"
    assert msgspec.json.decode((saved / "config").read_bytes(), type=FrontendConfig) == config
    assert {str(reader), str(writer)} <= set((saved / "fds").read_text().split())
    seen = variables(saved)
    assert seen["EPRT_TIMEOUT_S"] == "1" and "OMPI_COMM_WORLD_RANK" not in seen
    for fd in (reader, writer):
        os.close(fd)
