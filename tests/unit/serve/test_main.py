"""Which role a process of the server has, and how it exits when a flag is wrong."""

import os

import pytest

from eprt.serve import __main__ as program
from eprt.serve.options import OptionError
from eprt.serve.ranks import host_launch, launch
from eprt.serve.ranks import main as rank_main
from tests.unit.cases import MODEL

MODEL_FLAG = ["--model", str(MODEL)]


@pytest.fixture
def roles(monkeypatch) -> list[str]:
    """The roles that were taken."""
    taken: list[str] = []
    monkeypatch.setattr(launch, "launch", lambda options, argv: taken.append("mpirun") or 7)
    monkeypatch.setattr(host_launch, "launch", lambda options: taken.append("launcher") or 6)
    monkeypatch.setattr(rank_main, "run", lambda options: taken.append("rank") or 8)
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    return taken


@pytest.mark.parametrize(
    "flags, launched_rank, role, status",
    [
        ([], None, "rank", 8),
        (["-n", "1"], None, "rank", 8),
        (["-n", "2"], None, "launcher", 6),
        ([], "1", "rank", 8),
        (["-n", "2"], "1", "rank", 8),
    ],
)
def test_the_launcher_is_for_several_ranks_outside_of_mpirun(roles, monkeypatch, flags, launched_rank, role, status):
    if launched_rank is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", launched_rank)
    assert program.main([*MODEL_FLAG, *flags]) == status and roles == [role]


@pytest.mark.parametrize(
    "name, value", [("EPRT_RANKS_PER_NODE", "1"), ("SLURM_JOB_NUM_NODES", "2"), ("PBS_NODEFILE", "/nodes")]
)
def test_mpirun_starts_ranks_that_span_hosts_or_virtual_nodes(roles, monkeypatch, capfd, name, value):
    monkeypatch.setenv(name, value)
    assert program.main([*MODEL_FLAG, "-n", "2"]) == 7 and roles == ["mpirun"]
    assert program.main([*MODEL_FLAG, "-n", "2", "--max-lost-ranks", "1"]) == 2
    told = f"--max-lost-ranks needs ranks that eprt starts on one host, but {name} is "
    assert told in capfd.readouterr().err


@pytest.mark.parametrize("device, allowed", [("cpu", "1"), ("cuda", None)])
def test_weights_on_cpus_lie_in_huge_pages(roles, monkeypatch, device, allowed):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("THP_MEM_ALLOC_ENABLE", None)
    assert program.main([*MODEL_FLAG, "-n", "1", "--device", device]) == 8
    assert os.environ.get("THP_MEM_ALLOC_ENABLE") == allowed
    os.environ["THP_MEM_ALLOC_ENABLE"] = "0"  # what the user says stays
    assert program.main([*MODEL_FLAG, "-n", "1", "--device", device]) == 8
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"


def test_a_wrong_flag_or_variable_is_one_line_and_status_2(roles, monkeypatch, capfd):
    assert program.main([*MODEL_FLAG, "--port", "-1"]) == 2
    assert capfd.readouterr().err == "eprt serve: error: --port -1: must be in 0..65535\n"
    monkeypatch.setenv("EPRT_TIMEOUT_S", "soon")
    assert program.main(MODEL_FLAG) == 2
    assert capfd.readouterr().err.startswith("eprt serve: error: environment variable EPRT_TIMEOUT_S='soon'")
    assert not roles


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--attention-tp", "2"], "--attention-tp 2: without -n there is 1 rank, of which no teams of 2 can be made"),
        (["--prompt-ranks", "2"], "--prompt-ranks 2: without -n there is 1 rank; give -n, or leave it out"),
        (["--wire", "tcp", "--attention-tp", "2"], "--attention-tp 2: without -n there is 1 rank"),
        (["--inject", "slow-rank:1:2x"], "--inject fault slow-rank names rank 1; there are ranks 0..0"),
        (["--dry-run", "--prompt-ranks", "2"], "--prompt-ranks 2: without -n there is 1 rank"),
    ],
)
def test_what_the_default_number_of_ranks_does_not_allow_is_refused_before_any_starts(
    roles, monkeypatch, capfd, flags, words
):
    monkeypatch.setattr(program, "default_ranks", lambda: 1)
    assert program.main([*MODEL_FLAG, *flags]) == 2 and not roles
    told = capfd.readouterr().err
    assert told.startswith(f"eprt serve: error: {words}") and told.count("\n") == 1
    monkeypatch.setattr(program, "default_ranks", lambda: 2)
    assert "--wire" in flags or "--dry-run" in flags or program.main([*MODEL_FLAG, *flags]) == 6


@pytest.mark.parametrize("flags", [["--attention-tp", "2"], ["--prompt-ranks", "2"], ["--expert-host-copies", "node"]])
def test_virtual_nodes_share_no_memory(roles, monkeypatch, capfd, flags):
    monkeypatch.setenv("EPRT_RANKS_PER_NODE", "1")
    assert program.main([*MODEL_FLAG, "-n", "2", *flags]) == 2 and not roles
    assert f"{' '.join(flags)}: ranks that " in (told := capfd.readouterr().err) and "are of 2 nodes" in told
    monkeypatch.setenv("EPRT_RANKS_PER_NODE", "2")
    assert program.main([*MODEL_FLAG, "-n", "2", *flags]) == 7


def test_what_a_role_finds_wrong_is_told_alike(monkeypatch, capfd):
    def fails(options) -> int:
        raise OptionError("cannot listen on x:1: no")

    monkeypatch.setattr(rank_main, "run", fails)
    assert program.main(MODEL_FLAG) == 2
    assert capfd.readouterr().err == "eprt serve: error: cannot listen on x:1: no\n"
