"""Which role a process of the server has, and how it exits when a flag is wrong."""

import pytest

from eprt.serve import __main__ as program
from eprt.serve.options import OptionError
from eprt.serve.ranks import launch
from eprt.serve.ranks import main as rank_main
from tests.unit.cases import MODEL

MODEL_FLAG = ["--model", str(MODEL)]


@pytest.fixture
def roles(monkeypatch) -> list[str]:
    """The roles that were taken."""
    taken: list[str] = []
    monkeypatch.setattr(launch, "launch", lambda options, argv: taken.append("launcher") or 7)
    monkeypatch.setattr(rank_main, "run", lambda options: taken.append("rank") or 8)
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    return taken


@pytest.mark.parametrize(
    "flags, launched_rank, role, status",
    [
        ([], None, "rank", 8),
        (["-n", "1"], None, "rank", 8),
        (["-n", "2"], None, "launcher", 7),
        ([], "1", "rank", 8),
        (["-n", "2"], "1", "rank", 8),
    ],
)
def test_the_launcher_is_for_several_ranks_outside_of_mpirun(roles, monkeypatch, flags, launched_rank, role, status):
    if launched_rank is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", launched_rank)
    assert program.main([*MODEL_FLAG, *flags]) == status and roles == [role]


def test_a_wrong_flag_or_variable_is_one_line_and_status_2(roles, monkeypatch, capfd):
    assert program.main([*MODEL_FLAG, "--port", "-1"]) == 2
    assert capfd.readouterr().err == "eprt serve: error: --port -1: must be in 0..65535\n"
    monkeypatch.setenv("EPRT_TIMEOUT_S", "soon")
    assert program.main(MODEL_FLAG) == 2
    assert capfd.readouterr().err.startswith("eprt serve: error: environment variable EPRT_TIMEOUT_S='soon'")
    assert not roles


def test_what_a_role_finds_wrong_is_told_alike(monkeypatch, capfd):
    def fails(options) -> int:
        raise OptionError("cannot listen on x:1: no")

    monkeypatch.setattr(rank_main, "run", fails)
    assert program.main(MODEL_FLAG) == 2
    assert capfd.readouterr().err == "eprt serve: error: cannot listen on x:1: no\n"
