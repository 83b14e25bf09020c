"""`eprt env` for real: what it prints and how it exits, also where libraries are missing."""

import json
import os
import subprocess
import sys

import pytest

from eprt import doctor, env, machine, probe


def run_doctor(*arguments: str, code: str = "", **changes: str | None) -> subprocess.CompletedProcess:
    """`eprt env` in a fresh process; code runs in it first; changes of the environment, None to remove."""
    environment = {**os.environ, **{k: v for k, v in changes.items() if v is not None}}
    for name in (k for k, v in changes.items() if v is None):
        environment.pop(name, None)
    script = f"{code}\nimport sys\nfrom eprt.doctor import main\nsys.exit(main({list(arguments)!r}))"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300, check=False
    )


def test_this_machine_serves():
    done = run_doctor("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["cpu_serving"] and not any(problem["fatal"] for problem in report["problems"])
    findings = report["findings"]
    assert findings["MPI"]["size"] == 2 and "two ranks met" in findings["MPI"]["summary"]
    assert findings["torch"]["version"] == report["machine"]["versions"]["torch"]
    assert findings["native"]["isa"] in machine.isa_levels()
    assert report["machine"]["num_cpus"] == len(os.sched_getaffinity(0))


def test_it_survives_without_torch_and_mpi4py():
    """Every library that may be missing is missing; each gets its own remedy, and the exit status says so."""
    code = """
import importlib.util, sys
gone = ("torch", "mpi4py")
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in gone:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in gone else real(name, package)
"""
    done = run_doctor(code=code)
    assert done.returncode == 1 and done.stderr == ""
    assert "problem: torch is missing\n  mend: pip install torch==2.13.0" in done.stdout
    assert "warning: mpi4py is missing; only servers over several hosts, and EPGroup.from_mpi, need MPI" in done.stdout
    assert "mend: pip install mpi4py" in done.stdout
    assert "native library: torch is missing" in done.stdout
    assert "serving on CPU does not work yet" in done.stdout


def test_one_host_serves_without_mpi(monkeypatch, capsys):
    monkeypatch.setattr(probe.importlib.util, "find_spec", lambda name: None)
    missing = probe.mpi()
    monkeypatch.setattr(probe, "run_probes", lambda: [missing])
    assert doctor.main([]) == 0
    assert "serving on CPU works on one host; over several it needs MPI" in capsys.readouterr().out


def test_keys_are_not_printed():
    done = run_doctor("--json", EPRT_API_KEY="hush-hush", EPRT_ADMIN_KEY="very-hush")
    assert "(set)" in done.stdout and "hush" not in done.stdout + done.stderr


def test_a_wrong_variable_is_a_problem_with_its_remedy():
    done = run_doctor(EPRT_TIMEOUT_S="soon")
    assert done.returncode == 1
    assert "EPRT_TIMEOUT_S='soon'" in done.stdout and "mend: unset EPRT_TIMEOUT_S" in done.stdout


def test_the_variables_are_printed():
    done = run_doctor("--variables")
    assert done.returncode == 0
    for variable in env.TABLE.values():
        assert variable.name in done.stdout and variable.meaning in done.stdout


def test_the_text_puts_what_stops_you_first(monkeypatch, capsys):
    warning, fatal = probe.SetupProblem("small", "grow it"), probe.SetupProblem("gone", "get it", fatal=True)
    monkeypatch.setattr(probe, "run_probes", lambda: [probe.ProbeResult("X", "y", {}, (warning, fatal))])
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert out.index("problem: gone\n  mend: get it") < out.index("warning: small\n  mend: grow it")


def test_the_library_for_an_mpirun_of_ones_own(monkeypatch, capsys):
    assert doctor.main(["--loopback-library"]) == 0
    assert capsys.readouterr().out.strip().endswith("/lib/eprt_loopback.so")
    monkeypatch.setattr(doctor.mpirun, "loopback_library", lambda: None)
    assert doctor.main(["--loopback-library"]) == 1 and "not built" in capsys.readouterr().err


def test_one_thing_at_a_time(capsys):
    with pytest.raises(SystemExit, match="2"):
        doctor.main(["--json", "--variables"])
    assert "argument --variables: not allowed with argument --json" in capsys.readouterr().err


def test_an_environment_that_cannot_be_written_is_one_line(monkeypatch, capsys):
    def refused():
        raise PermissionError(13, "Permission denied", "/usr/etc/prte-mca-params.conf")

    monkeypatch.setattr(machine, "version", lambda name: "5.0")
    monkeypatch.setattr(probe, "configure_mpi", refused)
    assert doctor.main(["--configure-mpi"]) == 1
    err = capsys.readouterr().err
    assert "--configure-mpi: [Errno 13] Permission denied: '/usr/etc/prte-mca-params.conf'; whoever owns" in err
    assert err.count("\n") == 1
