"""The ranks of GPU cases without a GPU: spare ones that wait, the GPU that a worker sees, the numbers of ranks."""

import io
import re
import subprocess
import sys

import pytest

from tests.gpu import cases_low_latency_lost_ranks, launch, spare_ranks
from tests.gpu.conftest import gpu_of_worker
from tests.gpu.gpus import at_ranks
from tests.gpu.launch import run_gpu_ranks
from tests.gpu.shared import meaningful
from tests.gpu.spare_ranks import ROOT

CASES = "tests.unit.benchmarks.suite.rank_case"


@pytest.fixture
def spares(monkeypatch):
    own = spare_ranks.SpareRanks()
    monkeypatch.setattr(spare_ranks, "SPARES", own)
    yield own
    own.stop_all()


def test_ranks_run_their_case_and_one_that_fails_or_dies_is_named(spares):
    printed = run_gpu_ranks(2, f"{CASES}:greet", word="hello")
    assert "hello from 0 of 2: [0, 10]" in printed and "hello from 1 of 2: [0, 10]" in printed
    with pytest.raises(AssertionError, match=r"(?s)ranks \[1\] of .*ValueError: rank 1 cannot"):
        run_gpu_ranks(2, f"{CASES}:fail_on", rank=1)
    assert "rank 0 dies" in run_gpu_ranks(1, f"{CASES}:die_on", rank=0, killed=(0,))


def test_a_program_may_start_the_ranks(spares):
    with pytest.raises(AssertionError, match=r"(?s)ranks \[0\] of .*rank 0 dies"):
        run_gpu_ranks(1, f"{CASES}:die_on", rank=0, under=["env", "-u", "NO_SUCH"])
    assert not spares._waiting, "spare ranks are started by Python alone"


def test_ranks_of_the_next_case_are_already_there(spares, monkeypatch):
    started = []

    def start(rank, module):
        command = [sys.executable, "-c", "import sys; sys.stdin.readline()"]
        started.append((rank, module))
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end(ranks):
        for process in ranks:
            process.communicate("job\n", timeout=300)
            assert process.returncode == 0

    monkeypatch.setattr(spare_ranks, "start", start)
    end(spares.take_ranks(2, "a"))
    waiting = dict(spares._waiting)
    assert started == [(0, "a"), (1, "a")] * 2 and set(waiting) == {0, 1}
    waiting[1].kill()
    waiting[1].wait()
    ranks = spares.take_ranks(3, "b")
    assert ranks[0] is waiting[0] and ranks[1] is not waiting[1], "a spare that died is replaced"
    assert started[4:] == [(1, "b"), (2, "b"), (0, "b"), (1, "b"), (2, "b")]
    end(ranks)
    last = list(spares._waiting.values())
    spares.stop_all()
    assert all(process.returncode is not None for process in last) and not spares._waiting


def test_a_rank_without_a_job_ends(monkeypatch, capsys):
    """As spare ranks do when pytest is gone."""
    monkeypatch.setattr(launch.sys, "argv", ["launch", "0", CASES])
    monkeypatch.setattr(launch.sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(launch, "run_job", lambda *arguments, **job: pytest.fail("there was no job"))
    launch.main()


@pytest.mark.parametrize(
    "worker, total, visible, gpu",
    [("gw0", 4, "", "0"), ("gw3", 4, "", "3"), ("gw5", 4, "", "1"), ("gw1", 2, "6,7", "7"), ("gw3", 1, "5", "5")],
)
def test_each_worker_sees_one_gpu(worker, total, visible, gpu):
    assert gpu_of_worker(worker, total, visible) == gpu


@pytest.mark.parametrize(
    "most_ranks, halves",
    [(0, "oqll"), (1, "oqll"), (2, "oqll"), (3, "oqll"), (4, "olql"), (6, "olql"), (8, "ollq"), (16, "ollq")],
)
def test_one_rank_and_the_most_that_have_gpus_are_quick(most_ranks, halves):
    """o: of one GPU; q: quick; l: long. Without one rank among them the fewest are quick, to be skipped by name."""
    want = {"o": ["one_gpu"], "q": [], "l": ["long"]}
    params = at_ranks(1, 2, 4, 8, most_ranks=most_ranks)
    if most_ranks >= 2:
        assert [[mark.name for mark in one.marks] for one in params] == [want[half] for half in halves]
    params = at_ranks((2, 1), (4, 0), (8, 5), most_ranks=most_ranks)
    assert [one.values for one in params] == [(2, 1), (4, 0), (8, 5)]
    assert [[mark.name for mark in one.marks] for one in params] == [want[half] for half in halves[1:]]


def test_what_measures_is_left_out_where_ranks_share_a_gpu_and_is_named(capsys):
    cases = [cases_low_latency_lost_ranks.late_rank, cases_low_latency_lost_ranks.rank_returns]
    assert list(meaningful(cases, ranks_per_gpu=1)) == cases and not capsys.readouterr().out
    assert list(meaningful(cases, ranks_per_gpu=2)) == cases[1:]
    assert capsys.readouterr().out == "late_rank: left out, ranks share a GPU\n"


def test_every_case_that_a_gpu_test_names_exists():
    """Names in strings, which only a machine with GPUs would look up."""
    missing, found = [], 0
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        text = path.read_text()
        named = re.findall(r'"(?:tests\.gpu\.)?(cases_\w+):(\w+)"', text)
        own = re.search(r'^CASES = "(cases_\w+)"', text, re.MULTILINE)
        named += [(own[1], case) for case in re.findall(r'\brun\(\w+, "(\w+)"', text)] if own else []
        for module, function in named:
            cases = ROOT / "tests" / "gpu" / f"{module}.py"
            found += 1
            if not cases.is_file() or not re.search(rf"^def {function}\(", cases.read_text(), re.MULTILINE):
                missing.append(f"{path.name}: {module}:{function}")
    assert found > 15 and not missing, missing
