"""The runner of tests/gpu without a GPU: which half a test is in, when there is nothing to run, the warning of lint."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from benchmarks.suite import gpu_suite
from benchmarks.tools import measured, provenance
from benchmarks.tools.report import ROOT
from tests.unit.benchmarks.tools.test_provenance import commit, git

# Triton comes with CUDA builds of torch; here only its name is needed, so that no file is left out.
COLLECT = """
import json, sys, types, pytest

sys.modules["triton"] = types.ModuleType("triton")

class Names:
    def pytest_collection_finish(self, session):
        self.names = [item.nodeid.removeprefix("tests/gpu/") for item in session.items]

for expression in sys.argv[1:]:
    names = Names()
    pytest.main(["tests/gpu", "--collect-only", "-qq", "-p", "no:cacheprovider", "-m", expression], plugins=[names])
    print("NAMES " + json.dumps(names.names))
"""


DONE = "test_sanitizer.py::test_a_small_case_has_no_errors[memcheck]"


def collected(num_gpus: int, *expressions: str, done: tuple[str, ...] = ()) -> list[list[str]]:
    """The tests that each expression chooses, on a machine of so many GPUs. done: that need not run again."""
    environment = {**os.environ, "GPU_SUITE_GPUS": str(num_gpus), "GPU_SUITE_DONE": json.dumps(done)}
    environment.pop("PYTEST_XDIST_WORKER", None)  # of this test's own run
    session = subprocess.run(
        [sys.executable, "-c", COLLECT, *expressions],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = [line for line in session.stdout.splitlines() if line.startswith("NAMES ")]
    return [json.loads(line.removeprefix("NAMES ")) for line in lines]


@pytest.mark.parametrize("num_gpus", [1, 4])
def test_every_case_is_in_one_half_and_in_one_phase(num_gpus):
    expressions = [phase[-1] for half in gpu_suite.HALVES for phase in gpu_suite.phases(half, num_gpus)]
    everything, *parts = collected(num_gpus, "", *expressions)
    quick, long = ([*parts[i], *parts[i + 1]] for i in (0, 2))
    assert len(everything) == len(set(everything)) > 60
    assert sorted([*quick, *long]) == sorted(everything)
    names = " ".join(quick)
    for needed in ("test_ops", "test_low_latency.py", "test_normal", "graph_replay", "overlap", "goldens", "killed"):
        assert needed in names, needed
    assert not [test for test in quick if "sanitizer" in test or "10000" in test]
    assert [test for test in long if "10000" in test] and [test for test in long if "sanitizer" in test]
    ranks = max(num_gpus, 2)
    for test in ("test_low_latency.py::test_low_latency", "test_normal.py::test_graph_replay"):
        assert [one for one in quick if one.startswith(test)] == [f"{test}[{ranks}]"]
    assert "test_model.py::test_the_server_answers_a_chat[1]" in parts[0]
    side_by_side = " ".join(parts[0] + parts[2])
    assert "test_ops" in side_by_side and "[4" not in side_by_side and "killed" not in side_by_side


def test_a_test_that_is_done_is_left_out():
    (names,) = collected(2, "long", done=(f"tests/gpu/{DONE}", "tests/gpu/test_sanitizer.py::test_a_small"))
    assert "test_sanitizer.py::test_a_small_case_has_no_errors[racecheck-2-small]" in names and DONE not in names


def test_a_test_is_run_for_the_record_by_a_session_of_pytest(monkeypatch):
    """What the processes of the session are told."""
    seen = []
    monkeypatch.setattr(pytest, "main", lambda arguments, plugins: seen.append((arguments, plugins)) or statuses.pop())
    monkeypatch.setenv("GPU_SUITE_GPUS", "")
    monkeypatch.setenv("GPU_SUITE_DONE", "")
    record = SimpleNamespace(done=["tests/gpu/test_a.py::test_x"])
    statuses = [pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.OK]
    assert gpu_suite.run_pytest(["-m", "long"], 4, record) == gpu_suite.OK  # type: ignore
    assert os.environ["GPU_SUITE_GPUS"] == "4" and json.loads(os.environ["GPU_SUITE_DONE"]) == record.done
    assert seen[0][0][-2:] == ["-m", "long"] and seen[0][1] == [record]
    assert gpu_suite.run_pytest([], 4) == gpu_suite.NO_TESTS and os.environ["GPU_SUITE_DONE"] == "[]"
    assert gpu_suite.has_failed(gpu_suite.run_pytest([], 4)) and not gpu_suite.has_failed(gpu_suite.NO_TESTS)
    assert gpu_suite.INTERRUPTED == pytest.ExitCode.INTERRUPTED


def test_tests_of_one_gpu_run_side_by_side(monkeypatch):
    monkeypatch.setattr(gpu_suite.os, "cpu_count", lambda: 16)
    assert gpu_suite.phases("quick", 4) == [
        ["-n", "8", "-m", "one_gpu and not long"],
        ["-m", "not one_gpu and not long"],
    ]
    assert gpu_suite.phases("quick", 1)[0][:2] == ["-n", "6"], "as many as there are cores for"
    monkeypatch.setattr(gpu_suite.importlib.util, "find_spec", lambda name: None)
    assert gpu_suite.phases("long", 4)[0] == ["-m", "one_gpu and long"], "without xdist"


def test_ranks_that_share_one_gpu_leave_time_for_another_test_beside_theirs():
    assert gpu_suite.phases("quick", 1, 4)[1] == ["-n", "3", "--maxschedchunk", "1", "-m", "not one_gpu and not long"]
    assert gpu_suite.phases("quick", 2, 4)[1] == gpu_suite.phases("quick", 1)[1] == ["-m", "not one_gpu and not long"]


def test_where_ranks_share_a_gpu_tests_of_several_run_and_those_that_would_measure_are_left_out(monkeypatch):
    monkeypatch.setenv("EPRT_RANKS_PER_GPU", "4")
    (quick,) = collected(1, "not one_gpu and not long")
    assert "test_normal.py::test_graph_replay[4]" in quick and "test_normal.py::test_graph_replay[2]" not in quick
    assert not [test for test in quick if "10000" in test]


def test_nothing_runs_without_a_commit_or_without_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_suite, "run", lambda *arguments: pytest.fail("it ran"))
    monkeypatch.setattr(gpu_suite, "describe_gpus", lambda: {"gpus": []})
    monkeypatch.setattr(provenance, "measured_commit", lambda: (None, None))
    assert gpu_suite.main(["--directory", str(tmp_path)]) == 2
    assert "BENCHMARK_COMMIT" in capsys.readouterr().err
    monkeypatch.setattr(provenance, "measured_commit", lambda: ("0123", True))
    assert gpu_suite.main(["--directory", str(tmp_path)]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.fixture
def two_gpus(monkeypatch):
    """A run whose sessions of pytest note one test each. Returns their arguments."""
    seen = []

    def session(arguments, num_gpus, record=None):
        seen.append(arguments)
        assert num_gpus == 2
        if record is not None:
            report = {"nodeid": f"tests/gpu/test_a.py::test_{len(seen)}", "when": "call", "outcome": "passed"}
            record.pytest_runtest_logreport(SimpleNamespace(**report, duration=1.0))
        return gpu_suite.OK

    gpus = {"gpus": ["H200", "H200"], "driver": "580", "torch": "2.11", "cuda": "13"}
    monkeypatch.setattr(gpu_suite, "describe_gpus", lambda: gpus)
    monkeypatch.setattr(gpu_suite, "run_pytest", session)
    monkeypatch.setattr(gpu_suite.sys, "executable", "true")  # nothing is compiled ahead
    monkeypatch.setenv("EPRT_RANKS_PER_GPU", "1")  # put back afterwards
    return seen


def test_both_halves_run_one_after_the_other(two_gpus, monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "measured_commit", lambda: ("0123abcd", True))
    assert gpu_suite.main(["--directory", str(tmp_path)]) == 0
    assert [arguments[-1] for arguments in two_gpus] == [
        "one_gpu and not long",
        "not one_gpu and not long",
        "one_gpu and long",
        "not one_gpu and long",
    ]
    content = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert [row["half"] for row in content["rows"]] == ["quick", "quick", "long", "long"]
    assert [half["finished"] for half in content["config"]["halves"].values()] == [True, True]


def test_a_failure_in_any_phase_is_the_exit_status(two_gpus, monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "measured_commit", lambda: ("0123abcd", True))
    monkeypatch.setattr(gpu_suite, "run_pytest", lambda arguments, *_: int(arguments[-1] == "one_gpu and long"))
    assert gpu_suite.main(["--directory", str(tmp_path)]) == 1
    assert gpu_suite.main(["--half", "quick", "--directory", str(tmp_path)]) == 0


def test_a_run_whose_time_is_up_ends_and_is_recorded_as_not_finished(two_gpus, monkeypatch, tmp_path):
    def session(arguments, *_):
        two_gpus.append(arguments)
        if len(two_gpus) == 3:
            try:
                time.sleep(20)
            except KeyboardInterrupt:
                return gpu_suite.INTERRUPTED
        return gpu_suite.OK

    monkeypatch.setattr(provenance, "measured_commit", lambda: ("0123abcd", True))
    monkeypatch.setattr(gpu_suite, "run_pytest", session)
    assert gpu_suite.main(["--directory", str(tmp_path), "--seconds", "0.5"]) == 1
    assert len(two_gpus) == 3, "nothing was begun after it"
    content = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert content["config"]["halves"]["quick"]["finished"]


@pytest.mark.parametrize("told, clean", [("0123abcd", True), ("0123abcd+changes", False)])
def test_a_copy_without_a_repository_is_told_its_commit(two_gpus, told, clean, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(provenance, "git", lambda *arguments: None)
    monkeypatch.setenv("BENCHMARK_COMMIT", told)
    assert gpu_suite.main(["--half", "quick", "--directory", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert (content["commit"], content["clean"]) == ("0123abcd", clean)
    assert len(content["rows"]) == 2 and content["config"]["halves"]["quick"]["finished"]
    assert "2 passed, 0 failed, 0 skipped" in capsys.readouterr().out


def test_ranks_share_gpus_only_where_the_runner_was_told_so_and_the_record_says_it(two_gpus, tmp_path):
    sharing = ["--directory", str(tmp_path), "--half", "quick", "--ranks-per-gpu"]
    for ranks_per_gpu in (2, 3):
        assert gpu_suite.main([*sharing, str(ranks_per_gpu)]) == 0
        assert os.environ["EPRT_RANKS_PER_GPU"] == str(ranks_per_gpu)
    content = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert content["config"]["ranks_per_gpu"] == 3
    with pytest.raises(SystemExit):
        gpu_suite.main([*sharing, "0"])


def test_a_part_of_a_half_leaves_no_record(two_gpus, tmp_path, capsys):
    assert gpu_suite.main(["--directory", str(tmp_path), "-k", "low_latency"]) == 0
    assert not list(tmp_path.iterdir()) and "no record" in capsys.readouterr().out
    assert all(arguments[-2:] == ["-k", "low_latency"] for arguments in two_gpus)


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """A repository with a record of its first commit. Returns its folder and what writes the record's head."""
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(measured, "RESULTS", tmp_path / "benchmarks" / "results")
    monkeypatch.delenv("BENCHMARK_COMMIT", raising=False)
    git(tmp_path, "init", "-q")
    for folder in (*WATCHED, "eprt/serve", "docs", "benchmarks/results"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "old.txt").write_text("1")
    first = commit(tmp_path, "README.md", "text")

    def write(**head):
        content = {"commit": first, "clean": True, "rows": [], **head}
        (tmp_path / "benchmarks" / "results" / "gpu_suite.json").write_text(json.dumps(content))

    write()
    return tmp_path, write


WATCHED = ("csrc/cuda", "eprt/ep", "eprt/gpu", "eprt/layers", "eprt/ops/cuda", "eprt/engine")


def test_lint_is_silent_while_the_record_is_of_this_code(recorded, capsys):
    folder, _ = recorded
    commit(folder, "eprt/serve/page.py", "no GPU tests it")
    commit(folder, "docs/page.md", "text")
    assert gpu_suite.main(["--age"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("watched", WATCHED)
def test_lint_warns_of_a_change_that_only_a_gpu_can_test(recorded, watched, capsys):
    """Committed, not committed, and not even known to git; it never fails."""
    folder, _ = recorded
    (folder / watched / "new.txt").write_text("1")
    assert gpu_suite.main(["--age"]) == 0
    assert f"1 files of what it measures changed since commit {git(folder, 'rev-parse', 'HEAD')[:12]}" in (
        told := capsys.readouterr().err
    )
    assert told.startswith("warning: benchmarks/results/gpu_suite.json") and "make test-gpu" in told
    (folder / watched / "new.txt").unlink()
    (folder / watched / "old.txt").write_text("2")
    assert f"{watched}/old.txt" in (gpu_suite.age_warning() or "")
    commit(folder, f"{watched}/old.txt", "3")
    assert f"{watched}/old.txt" in (gpu_suite.age_warning() or "")


def test_lint_warns_of_a_record_of_a_dirty_tree_and_of_no_record(recorded):
    _, write = recorded
    write(clean=False)
    assert "the tree that was measured differs from commit" in (gpu_suite.age_warning() or "")
    write(commit=None, clean=None)
    assert "does not say which commit" in (gpu_suite.age_warning() or "")


def test_lint_says_nothing_where_there_is_no_history(recorded, monkeypatch):
    monkeypatch.setattr(provenance, "git", lambda *arguments: None)
    assert gpu_suite.age_warning() is None
