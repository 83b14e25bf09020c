"""The exchange over real processes, on real and virtual nodes, through MPI, torch.distributed and a host's board."""

import signal
import subprocess
import threading
from pathlib import Path

import pytest

from eprt import env
from tests.ranks.launch import ROOT, mpirun, run_ranks
from tests.ranks.launch_host import run_host_ranks
from tests.ranks.launch_torch import assert_all_ended_well, finish, run_torch_ranks, start_torch_ranks
from tests.ranks.shared_files import is_of_no_process
from tests.serve.processes import wait_until

CASES = "tests.ranks.cases_ep_wait"


def nodes_of(ranks_per_node: int | None) -> dict[str, str]:
    return {"EPRT_RANKS_PER_NODE": str(ranks_per_node)} if ranks_per_node else {}


# (ranks, ranks of a virtual node, nodes); those of one line at the same time.
MPI_GROUPS = [
    [(7, None, 1)],
    [(7, 2, 4)],
    [(7, 3, 3)],
    [(4, None, 1), (3, None, 1)],
    [(4, 2, 2), (3, 1, 3)],
    [(2, None, 1), (1, None, 1)],
]


def test_mpi():
    """In one launch, because importing torch takes longer than the cases of most groups."""
    run_ranks(7, f"{CASES}:everything_in_groups", rounds=MPI_GROUPS)


@pytest.mark.parametrize("num_ranks, ranks_per_node, num_nodes", [(2, None, 1), (3, 2, 2)])
def test_torch(num_ranks, ranks_per_node, num_nodes):
    options = {"num_nodes": num_nodes, "num_configs": 8}
    run_torch_ranks(num_ranks, f"{CASES}:everything", extra_env=nodes_of(ranks_per_node), **options)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_host(num_ranks):
    assert_all_ended_well(run_host_ranks(num_ranks, f"{CASES}:everything", num_nodes=1, num_configs=8))


def test_killed_rank_host():
    results = run_host_ranks(3, f"{CASES}:lose_a_rank", victim=1, phase="combine")
    assert results[1][0] == -signal.SIGKILL, results[1]
    for rank in (0, 2):
        assert f"rank {rank} survived the loss of 1 in combine" in results[rank][1], results[rank]


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_a_late_rank_alone_is_charged_with_what_it_cost(num_ranks):
    assert_all_ended_well(run_host_ranks(num_ranks, "tests.ranks.cases_late_rank:on_cpus"))


def test_a_rank_that_is_late_while_all_set_up_is_waited_for_and_one_in_service_is_not():
    assert_all_ended_well(run_host_ranks(3, "tests.ranks.cases_set_up:on_cpus"))


@pytest.mark.parametrize(
    "phase, ranks_per_node", [("exchange", None), ("dispatch", None), ("combine", None), ("dispatch", 2)]
)
def test_killed_rank_torch(phase, ranks_per_node):
    victim = 2
    started = start_torch_ranks(
        3, f"{CASES}:lose_a_rank", extra_env=nodes_of(ranks_per_node), victim=victim, phase=phase
    )
    results = finish(started, timeout_s=400)
    assert results[victim][0] == -signal.SIGKILL, results[victim]
    for rank in (0, 1):
        assert f"rank {rank} survived the loss of {victim} in {phase}" in results[rank][1], results[rank]


def test_killed_rank_mpi():
    """With ULFM mpirun leaves the survivors alone, so what they say can be seen. Whether MPI_Finalize, which comes
    next, then returns is Open MPI's affair: now and then it does not."""
    arguments = ["-m", "tests.ranks.launch", f"{CASES}:lose_a_rank", '{"victim": 1, "phase": "combine"}']
    command = mpirun(3, *arguments, options=("--with-ft", "ulfm"))
    environment = {**env.mpi_environment(), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        too_late = threading.Timer(400, process.terminate)
        too_late.start()
        said, missing = "", {f"rank {rank} survived the loss of 1 in combine" for rank in (0, 2)}
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            missing = {sentence for sentence in missing if sentence not in said}
            if not missing:
                break
        too_late.cancel()
        process.terminate()
    assert not missing, said


def test_nothing_is_left_in_shared_memory():
    """A group made without MPI leaves no name anywhere, also when all its ranks are killed."""
    before = set(Path("/dev/shm").iterdir())
    started = start_torch_ranks(2, f"{CASES}:print_and_wait")
    for process in started:
        assert process.read_line() == "ready\n"
    for process in started:
        process.kill()
    finish(started, timeout_s=400)
    # Other tests' ranks have some meanwhile, which a moment before or after their lives nobody maps.
    new = [path for path in set(Path("/dev/shm").iterdir()) - before if "eprt" in path.name]
    wait_until(lambda: not [path for path in new if is_of_no_process(path)], f"an end of what is left of {new}")
