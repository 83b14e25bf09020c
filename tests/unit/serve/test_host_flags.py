"""Flags of servers over several hosts: what is refused, before anything is started, and in which words."""

import pytest

from eprt.serve import __main__ as program
from eprt.serve.flags import parse_options
from eprt.serve.hosts import launch
from eprt.serve.options import OptionError, ServeOptions
from tests.unit.cases import MODEL

MODEL_FLAG = ["--model", str(MODEL)]
TWO = ["--nnodes", "2", "--dist-init-addr", "127.0.0.1:7000"]


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("EPRT_GROUP_KEY", raising=False)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--node-rank", "0"], "--node-rank 0: is of several hosts; give --nnodes too, or leave it out"),
        (["--dist-init-addr", "a:1"], "--dist-init-addr a:1: is of several hosts; give --nnodes too"),
        (["--nnodes", "0"], "--nnodes 0: must be at least 1"),
        ([*TWO, "--node-rank", "2"], "--node-rank 2: must be in 0..1 with --nnodes 2"),
        ([*TWO, "--node-rank", "-1"], "--node-rank -1: must be in 0..1 with --nnodes 2"),
        ([*TWO, "--dist-timeout", "0"], "--dist-timeout 0: must be above 0"),
        (["--nnodes", "2"], "--nnodes 2: the hosts must meet; give --dist-init-addr HOST:PORT, an address of host 0"),
        (["--nnodes", "2", "--dist-init-addr", "a"], "--dist-init-addr a: write HOST:PORT, an address of host 0"),
        (["--nnodes", "2", "--dist-init-addr", "0.0.0.0:1"], "--dist-init-addr 0.0.0.0:1: is no address that others"),
        (["--nnodes", "2", "--dist-init-addr", "10.0.0.1:1"], "whoever reaches it could join; set EPRT_GROUP_KEY to"),
        (["--wire", "udp"], "--wire: wire 'udp': must be one of tcp, paced"),
        (["--wire", "tcp:speed=2"], "--wire: wire 'tcp:speed=2': no setting 'speed'"),
        ([*TWO, "--device", "cuda"], "--device cuda: with --nnodes 2 ranks compute on CPUs; leave it out, or give"),
        (
            [*TWO, "-n", "2", "--max-lost-ranks", "1"],
            "--max-lost-ranks 1: needs ranks that share the memory of one host",
        ),
        (
            ["--wire", "tcp", "--prefill", "1", "--decode", "1"],
            "--decode 1: instances are of one host; leave out --wire",
        ),
        ([*TWO, "-n", "2", "--inject", "slow-rank:4:2x"], "--inject"),
    ],
)
def test_wrong_use_is_one_line(flags, message):
    with pytest.raises(OptionError) as raised:
        parse_options([*MODEL_FLAG, *flags])
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_what_is_given_arrives(monkeypatch):
    monkeypatch.setenv("EPRT_GROUP_KEY", "k")
    flags = ["--nnodes", "3", "--node-rank", "2", "--dist-init-addr", "[fd00::1]:7000", "--wire", "tcp:threads=2"]
    options = parse_options([*MODEL_FLAG, "-n", "4", *flags, "--inject", "slow-rank:11:2x"])
    assert (options.nnodes, options.node_rank, options.total_ranks, options.uses_wire) == (3, 2, 12, True)
    assert parse_options([*MODEL_FLAG, "--nnodes", "1", "--node-rank", "0"]).uses_wire is False


@pytest.fixture
def launched(monkeypatch) -> list[ServeOptions]:
    taken: list[ServeOptions] = []
    monkeypatch.setattr(launch, "launch", lambda options: taken.append(options) or 5)
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    return taken


@pytest.mark.parametrize("flags", [TWO, ["--wire", "tcp"]])
def test_the_launcher_is_its_own_under_a_scheduler(launched, monkeypatch, capfd, flags):
    """Also with what would mean mpirun without these flags."""
    monkeypatch.setenv("EPRT_RANKS_PER_NODE", "1")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("PMI_RANK", "1")  # of srun
    assert program.main([*MODEL_FLAG, *flags]) == 5 and launched[0].num_ranks >= 1
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert program.main([*MODEL_FLAG, *flags]) == 2
    assert f"{flags[0]}: eprt starts the ranks of each host itself; leave out mpirun" in capfd.readouterr().err


def test_a_dry_run_tells_the_memory_of_all_hosts_ranks(launched, capfd):
    program.main([*MODEL_FLAG, *TWO, "-n", "2", "--dry-run"])
    assert "each of 4 ranks" in capfd.readouterr().out and not launched
