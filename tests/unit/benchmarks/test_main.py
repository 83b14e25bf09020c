"""`eprt bench`: which benchmarks run, and what is said of those that fail."""

import sys

import pytest

import benchmarks.__main__ as bench
from benchmarks.tools import catalogue
from benchmarks.tools.catalogue import Benchmark


@pytest.fixture
def scripts(monkeypatch):
    """Benchmarks that are a line of Python each; flags are appended to their arguments."""
    python = [sys.executable, "-c"]
    code = {
        "bad": "raise SystemExit(3)",
        "endless": "import time; time.sleep(60)",
        "good": "import sys; print('good ran', *sys.argv[1:])",
        "slow": "print('slow ran')",
    }
    found = [
        Benchmark(name, f"benchmarks.room.{name}", (0,), False, "", "takes long" if name == "slow" else "", "")
        for name in code
    ]
    monkeypatch.setattr(catalogue, "find", lambda: found)
    monkeypatch.setattr(Benchmark, "commands", lambda self, flags: [[*python, code[self.name], *flags]])


def test_a_failing_or_endless_benchmark_fails_the_run_and_the_others_still_run(scripts, capfd):
    assert bench.main(["--timeout-s", "2"]) == 1
    streams = capfd.readouterr()
    assert "good ran" in streams.out and "failed: bad, endless" in streams.out
    assert "slow ran" not in streams.out and "left out, by name only: slow (takes long)" in streams.out
    assert "bad: exit status 3" in streams.err and "endless: not done after 2 s" in streams.err


def test_what_is_named_runs_with_its_own_flags(scripts, capfd):
    assert bench.main(["good", "slow"]) == 0
    streams = capfd.readouterr()
    assert "good ran" in streams.out and "slow ran" in streams.out and "left out" not in streams.out
    assert bench.main(["good", "--", "--eplb", "x.py"]) == 0
    assert "good ran --eplb x.py" in capfd.readouterr().out


@pytest.mark.parametrize("names", [[], ["good", "slow"]])
def test_flags_are_for_one_benchmark(names, scripts, capsys):
    with pytest.raises(SystemExit):
        bench.main([*names, "--", "--fast"])
    assert "flags behind -- are for one benchmark" in capsys.readouterr().err


def test_an_unknown_benchmark_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main(["nonsense"])
    told = capsys.readouterr().err
    assert "no benchmark nonsense; there are bench_affinity, " in told and ", serve, soak" in told


def test_the_list_has_a_line_for_each(capsys):
    assert bench.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [one.name for one in catalogue.find()]


@pytest.mark.parametrize("value", ["nan", "-1", "0", "inf"])
def test_a_deadline_is_a_number_of_seconds(value, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--list", "--timeout-s", value])
    assert f"--timeout-s {value}: must be above 0" in capsys.readouterr().err
