"""The house: version, packaging, make's verbs, links in the documentation, and the tools that benchmarks share."""

import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import benchmarks.__main__ as bench
import eprt
from benchmarks.tools import report
from benchmarks.tools.report import BenchmarkReport, table
from benchmarks.tools.timing import Timing, measure

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_said_once_and_twice_the_same():
    assert PROJECT["project"]["version"] == eprt.__version__
    assert f"## {eprt.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_nvshmem_is_never_a_hard_dependency():
    """Its two wheels own the same files; torch's CUDA builds already bring the one they need."""
    assert not [r for r in PROJECT["project"]["dependencies"] if "nvshmem" in r or "nvidia" in r]
    extras = PROJECT["project"]["optional-dependencies"]
    assert any(r.startswith("nvidia-nvshmem-cu12") for r in extras["cuda12"])
    assert not any("cu12" in r for r in extras["cuda13"])
    assert {"build", "mpi", "test", "lint", "cuda12", "cuda13"} <= set(extras)


def test_everything_public_can_be_imported():
    for name in eprt.__all__:
        assert getattr(eprt, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'EPMoe'"):
        eprt.EPMoe  # noqa: B018


def make(*arguments: str) -> str:
    done = subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_lists_the_verbs_that_readers_are_told():
    listed = {line.split()[0] for line in make("help").splitlines()}
    assert {"serve", "test", "bench", "lint", "fmt", "demo-model", "clean"} <= listed
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        told = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", path.read_text(), re.MULTILINE))
        assert told <= listed, f"{path.name}: {told - listed}"


def test_make_serve_installs_no_test_tools():
    assert "test tools" not in make("-n", "serve", "VENV=no-such-venv")
    assert "test tools" in make("-n", "test", "VENV=no-such-venv")


def test_links_inside_the_documentation_lead_somewhere():
    dead = []
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
            if "://" not in target and not (path.parent / target).exists():
                dead.append(f"{path.name}: {target}")
    assert not dead, dead


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_to_a_heading_lead_to_one():
    links, dead = 0, []
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)]*)\)", path.read_text()):
            page = path.parent / target if target else path
            links += 1
            if anchor not in anchors(page.read_text()):
                dead.append(f"{path.name}: {target}#{anchor}")
    assert links > 10 and not dead, dead


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    missing = [
        path.name for path in (ROOT / "docs").glob("*.md") if f"({path.name})" not in index and path.name != "index.md"
    ]
    assert not missing, f"list {', '.join(missing)} in docs/index.md"


# ---- benchmarks' tools ----------------------------------------------------------------------------------------------


def test_timing_is_median_and_spread():
    timing = Timing.from_samples([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (timing.median_s, timing.samples) == (3.0, 5)
    assert timing.p10_s == pytest.approx(1.4) and timing.p90_s == pytest.approx(4.6)
    assert timing.columns("ours", "ms") == {"ours_ms": 3000.0, "ours_p10_ms": 1400.0, "ours_p90_ms": 4600.0}
    with pytest.raises(ValueError, match="at least one"):
        Timing.from_samples([])


def test_measure_alternates_and_calls_equally_often():
    calls: list[str] = []
    times = measure(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        samples=4, calls_per_sample=2, warmup=1, before=lambda: calls.append("|"),
    )  # fmt: skip
    assert "".join(calls) == "ab" + "|aa|bb" + "|bb|aa" + "|aa|bb" + "|bb|aa"
    assert times["a"].samples == times["b"].samples == 4


def test_measure_tells_slow_from_fast():
    times = measure({"slow": lambda: time.sleep(0.02), "fast": lambda: None}, samples=3)
    assert times["slow"].median_s >= 0.02 > times["fast"].median_s


def test_a_report_prints_a_table_and_writes_what_readers_expect(tmp_path, capsys):
    one = BenchmarkReport("demo", {"hidden": 8})
    one.add_row(m=1, ours_us=1.23456, ours_p10_us=1.0, ratio=0.5)
    one.add_row(m=64, ours_us=123456.7, ratio=2.0, note="x")
    path = one.finish(tmp_path)
    printed = capsys.readouterr().out
    assert "demo  hidden=8" in printed and "1.235" in printed and "123457" in printed and "p10" not in printed
    content = json.loads(path.read_text())
    assert list(content) == ["name", "config", "commit", "machine", "rows"]
    assert content["rows"][0]["ours_p10_us"] == 1.0 and content["machine"]["num_cores"] >= 1


def test_a_table_lines_up_and_leaves_gaps_for_missing_columns():
    lines = table([{"a": 1, "b": 2.5}, {"a": 100, "c": "x"}]).splitlines()
    assert lines == ["  a    b  c", "  1  2.5", "100       x"]


def test_the_commit_says_when_the_tree_differs(monkeypatch):
    answers = {"rev-parse": "abc", "status": ""}
    monkeypatch.setattr(report, "_git", lambda *arguments: answers[arguments[0]])
    assert report.commit() == "abc"
    answers["status"] = " M eprt/env.py"
    assert report.commit() == "abc+changes"
    monkeypatch.setattr(report, "_git", lambda *arguments: None)
    assert report.commit() is None


def test_benchmarks_are_found_by_their_constants(tmp_path):
    (tmp_path / "plain.py").write_text('"""Plain.\n\nMore."""\nNUM_RANKS = 0\n')
    (tmp_path / "ranks.py").write_text("import a_missing_module\nNUM_RANKS = (2, 4)\nNEEDS_GPU = True\n")
    (tmp_path / "helper.py").write_text("X = 1\n")
    plain, ranks = bench.find(tmp_path)
    assert (plain.name, plain.summary, plain.needs_gpu) == ("plain", "Plain.", False)
    assert plain.commands() == [[sys.executable, "-m", "benchmarks.plain"]]
    assert ranks.needs_gpu and [command[:3] for command in ranks.commands()] == [
        ["mpirun", "-n", "2"],
        ["mpirun", "-n", "4"],
    ]


def test_no_benchmark_is_overlooked():
    folder = Path(bench.__file__).parent
    say_so = {
        path.stem for path in folder.glob("*.py") if re.search(r"^[A-Z_, ]*NUM_RANKS\b.*=", path.read_text(), re.M)
    }
    found = {benchmark.name: benchmark for benchmark in bench.find()}
    assert say_so == set(found)
    assert found["bench_ep"].needs_gpu and found["bench_ep"].num_ranks == (2, 4, 8)


def test_a_failing_or_endless_benchmark_fails_the_run_and_the_others_still_run(monkeypatch, capfd):
    python = [sys.executable, "-c"]
    commands = {
        "good": [*python, "print('good ran')"],
        "bad": [*python, "raise SystemExit(3)"],
        "endless": [*python, "import time; time.sleep(60)"],
    }
    found = [bench.Benchmark(name, (0,), False, "") for name in ("bad", "endless", "good")]
    monkeypatch.setattr(bench, "find", lambda: found)
    monkeypatch.setattr(bench.Benchmark, "commands", lambda self: [commands[self.name]])
    assert bench.main(["--timeout-s", "2"]) == 1
    streams = capfd.readouterr()
    assert "good ran" in streams.out and "failed: bad, endless" in streams.out
    assert "bad: exit status 3" in streams.err and "endless: not done after 2 s" in streams.err
    assert bench.main(["good"]) == 0


def test_an_unknown_benchmark_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main(["nonsense"])
    told = capsys.readouterr().err
    assert "no benchmark nonsense" in told and told.rstrip().endswith("and serve, layer with flags of their own")


def test_the_list_has_all_that_eprt_bench_runs(capsys):
    assert bench.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [benchmark.name for benchmark in bench.find()] + ["serve", "layer"]
