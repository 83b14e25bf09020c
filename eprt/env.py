"""Environment variables: the only reader of os.environ. Every variable that eprt understands is in TABLE.

A bad value raises ValueError that names the variable. `eprt env --variables` prints the table. Knows nothing of who
uses a variable.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Variable:
    """One environment variable. get(name) gives its parsed value."""

    name: str
    default: Any
    parse: Callable[[str], Any]  # raises ValueError for text that cannot be parsed
    meaning: str  # one line, as docs/environment.md has it
    is_secret: bool = False  # never printed, logged or handed to another process


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value


_LONGEST_S = 1e9  # seconds: of more, nanoseconds fill the 64 bits in which clocks count


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < _LONGEST_S:
        raise ValueError(f"must be above 0 and below {_LONGEST_S:g}")
    return value


def _key(text: str) -> str:
    if not (text.isascii() and text.isprintable()):
        raise ValueError("must be printable ASCII")
    return text


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


TABLE: dict[str, Variable] = {
    v.name: v
    for v in (
        Variable(
            "EPRT_RANKS_PER_NODE",
            None,
            _positive_int,
            "split one host into virtual nodes of this many ranks, so that node-aware code runs on one machine",
        ),
        Variable("EPRT_TIMEOUT_S", 30.0, _positive_float, "deadline of every wait between ranks, in seconds"),
        Variable(
            "EPRT_SET_UP_TIMEOUT_S",
            3600.0,
            _positive_float,
            "deadline of waits while ranks set up and all live, in seconds; one may still load a model, or compile",
        ),
        Variable(
            "EPRT_GPU_TIMEOUT_S", 10.0, _positive_float, "deadline of a GPU kernel's wait for another rank, in seconds"
        ),
        Variable(
            "EPRT_RANKS_PER_GPU",
            1,
            _positive_int,
            "for tests: how many ranks may share a GPU, which then takes turns among them, some milliseconds each",
        ),
        Variable(
            "EPRT_DEEP_EP_TOKENS",
            4096,
            _positive_int,
            "tokens of a rank in one normal-mode call that the size hint of DeepEP's interface makes room for",
        ),
        Variable(
            "EPRT_CPU_ISA",
            None,
            _one_of("scalar", "avx2", "avx512", "amx"),
            "widest instruction set the CPU kernels may use; default: the widest this CPU has",
        ),
        Variable(
            "EPRT_GPU_ATTENTION",
            "auto",
            _one_of("auto", "flashmla", "eprt", "triton"),
            "kernel of attention on GPUs; auto: the first of the others that fits; prompts: triton, or what is fastest",
        ),
        Variable(
            "EPRT_GPU_ATTENTION_CUTS",
            "any",
            _one_of("any", "none"),
            "whether eprt's attention kernel may cut a request's context; none: bits do not depend on other requests",
        ),
        Variable(
            "EPRT_GPU_ATTENTION_QUERY",
            "fp8",
            _one_of("fp8", "2xfp8"),
            "how eprt's attention kernel rounds queries over an fp8 cache; 2xfp8: to two numbers, more exact, slower",
        ),
        Variable(
            "EPRT_GPU_INDEXER",
            "auto",
            _one_of("auto", "eprt", "triton"),
            "kernels of the indexer on GPUs; auto: the first of the others that fits; triton: for all inputs",
        ),
        Variable(
            "EPRT_KERNEL_CACHE",
            "~/.cache/eprt/cubins",
            str,
            "directory of compiled CUDA kernels, named by the hash of all that decides them",
        ),
        Variable(
            "EPRT_LAUNCHER_PID",
            None,
            _positive_int,
            "set by `python -m eprt.serve -n` for its ranks under mpirun: they stop when this process is gone",
        ),
        Variable(
            "EPRT_API_KEY",
            None,
            _key,
            "key of a server's /v1 paths, for `eprt serve` and for every command that asks a server",
            is_secret=True,
        ),
        Variable(
            "EPRT_ADMIN_KEY",
            None,
            _key,
            "key of what changes a server (moves experts, retires ranks), for `eprt serve` and its commands",
            is_secret=True,
        ),
        Variable(
            "EPRT_GROUP_KEY",
            None,
            _key,
            "secret that ranks of several hosts, started without MPI, prove to each other; the same on all hosts",
            is_secret=True,
        ),
        Variable(
            "EPRT_LOG_LEVEL",
            "info",
            _one_of("debug", "info", "warning", "error"),
            "how much the ranks log to standard error",
        ),
    )
}


def get(name: str) -> Any:
    """The parsed value of variable `name`, or its default when it is unset or empty."""
    variable = TABLE[name]
    text = os.environ.get(name, "")
    if text == "":
        return variable.default
    try:
        return variable.parse(text)
    except ValueError as error:
        shown = "" if variable.is_secret else f"={text!r}"
        raise ValueError(f"environment variable {name}{shown}: {error}. It means: {variable.meaning}") from None


def check() -> None:
    """Raises ValueError for the first bad value, and for an EPRT_ variable that does not exist: it is a typo."""
    for name in os.environ:
        if name.startswith("EPRT_") and name not in TABLE:
            raise ValueError(f"unknown environment variable {name}; eprt reads {', '.join(TABLE)}")
    for name in TABLE:
        get(name)


# Open MPI runs as root only with both of these, and reads them from the environment alone.
ROOT_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

# Parameters of Open MPI, by the file under PREFIX/etc that may hold them. They allow more ranks than cores, leave the
# binding to eprt/bind.py, and keep UCX from complaining about shared windows.
MPI_PARAMETERS = {
    "prte-mca-params.conf": {"rmaps_default_mapping_policy": ":oversubscribe", "hwloc_default_binding_policy": "none"},
    "openmpi-mca-params.conf": {"osc": "^ucx"},
}
_PARAMETER_PREFIX = {"prte-mca-params.conf": "PRTE_MCA_", "openmpi-mca-params.conf": "OMPI_MCA_"}

MPI_ENVIRONMENT = {
    **ROOT_ENVIRONMENT,
    **{_PARAMETER_PREFIX[file] + k: v for file, parameters in MPI_PARAMETERS.items() for k, v in parameters.items()},
}


_RANKS_WITHOUT_TCP = {"OMPI_MCA_btl": "^tcp"}


def mpi_parameter_is_set(file: str, name: str) -> bool:
    """Whether the environment sets this parameter of MPI_PARAMETERS, whatever its value."""
    return _PARAMETER_PREFIX[file] + name in os.environ


def mpi_environment(one_host: bool = False) -> dict[str, str]:
    """A copy of the environment with Open MPI's variables set where the user set none, for starting mpirun.
    one_host: ranks then open no TCP port (eprt/mpirun.py has mpirun's own)."""
    # Open MPI does not start without HOME, and system services of systemd have none.
    home = os.path.expanduser("~")
    tcp = _RANKS_WITHOUT_TCP if one_host else {}
    return {**MPI_ENVIRONMENT, **tcp, "HOME": home if os.path.isabs(home) else "/", **os.environ, **ROOT_ENVIRONMENT}


def without_mpi() -> dict[str, str]:
    """A copy of the environment without the variables that mark an MPI rank, for child processes that are not ranks."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_"))}


def of_server(variables: dict[str, str]) -> dict[str, str]:
    """The environment of a process that joins a server: eprt's variables are the server's, the rest is of here."""
    return {**{k: v for k, v in without_mpi().items() if k not in TABLE}, **variables}


def eprt_variables() -> dict[str, str]:
    """eprt's own variables as they are set here, for other processes of the server; without secrets."""
    return {name: os.environ[name] for name, each in TABLE.items() if name in os.environ and not each.is_secret}


def close_ranks_ports() -> None:
    """To be called before MPI starts: a rank whose job is on one host needs no TCP, unless the user chose otherwise."""
    if os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == os.environ.get("OMPI_COMM_WORLD_SIZE") is not None:
        for name, value in _RANKS_WITHOUT_TCP.items():
            os.environ.setdefault(name, value)


@contextmanager
def of_lone_process(folder: str) -> Iterator[None]:
    """Within the block Open MPI, as it starts, keeps its directory in folder, makes no shared segment and opens no
    port: nobody can come to a process that no launcher has started."""
    given = {
        "OMPI_MCA_btl": "^sm,tcp",
        **{k: v for k, v in os.environ.items() if k == "OMPI_MCA_btl"},
        "TMPDIR": folder,
    }
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def admin_key() -> str | None:
    """What a command that changes a server sends where no key is given."""
    return get("EPRT_ADMIN_KEY") or get("EPRT_API_KEY")


def notify_socket() -> str | None:
    """Where systemd wants to be told that a service of Type=notify is ready."""
    return os.environ.get("NOTIFY_SOCKET") or None


def hub_cache() -> Path:
    """Where Hugging Face's programs keep what they have downloaded."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


# By launcher: where it announces a rank, and the size of its job. One within another's job leaves that one's there.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMIX_RANK", None),  # PMIx tells the size to MPI alone
    ("PMI_RANK", "PMI_SIZE"),  # MPICH and Intel MPI
)


def launched_rank() -> int | None:
    """This process's rank as its MPI launcher announces it, before MPI itself is loaded; None outside any launcher."""
    return next((rank for rank_name, _ in _LAUNCHERS if (rank := _announced(rank_name)) is not None), None)


def launched_size() -> int | None:
    """Of the job, as the launcher that launched_rank() believes announces it; None where it does not."""
    launcher = next((names for names in _LAUNCHERS if _announced(names[0]) is not None), None)
    return None if launcher is None or launcher[1] is None else _announced(launcher[1])


def _announced(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def started_by_mpirun() -> bool:
    """Whether a launcher says that this process is a rank of an MPI job."""
    return launched_rank() is not None


def started_by_open_mpi() -> bool:
    """Whether mpirun has started this process; srun alone may announce ranks too."""
    return "OMPI_COMM_WORLD_RANK" in os.environ


# Of job schedulers and of Open MPI: a number of nodes above 1, or a file that lists hosts.
_NUM_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "PBS_NUM_NODES")
_HOST_FILES = ("PBS_NODEFILE", "PE_HOSTFILE", "LSB_DJOB_HOSTFILE", "LSB_HOSTS")
_HOST_PARAMETERS = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile")


def why_mpirun() -> str | None:
    """Why ranks must be started by mpirun: they may span hosts, or virtual nodes. None where one host has them all."""
    if get("EPRT_RANKS_PER_NODE") is not None:
        return "EPRT_RANKS_PER_NODE is set"
    return may_span_hosts()


def may_span_hosts() -> str | None:
    """Which variable of a scheduler or of Open MPI names more hosts than one; None where there is none."""
    for name in _NUM_NODES:
        if os.environ.get(name, "1") != "1":
            return f"{name} is {os.environ[name]}"
    return next((f"{name} is set" for name in _HOST_FILES + _HOST_PARAMETERS if os.environ.get(name)), None)


def mpi_may_run_as_root() -> bool:
    """Whether Open MPI's mpirun would start: the user is not root, or both variables are set."""
    return os.geteuid() != 0 or all(os.environ.get(k) == v for k, v in ROOT_ENVIRONMENT.items())


def let_openmp_sleep() -> None:
    """Before torch is imported: OpenMP's threads sleep between loops, here and in processes that are started from here,
    unless the user says otherwise. Spinning, they would take the cores from the threads of csrc/cpu/team.h.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def let_torch_use_huge_pages() -> None:
    """Before torch first allocates: its tensors of 2 MB and more lie in huge pages, here and in processes that are
    started from here, unless the user says otherwise. A core reads them faster: it looks up a 512th of the addresses.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def openmp_sleeps() -> bool:
    """Whether OpenMP's threads do not spin between loops; so they were told before they started."""
    return os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"


def prepare_nvshmem(heap_bytes: int, one_host: bool) -> None:
    """Before NVSHMEM starts, what it reads from the environment alone, unless the user says otherwise.

    heap_bytes: of its symmetric heap. one_host: no rank needs a network card.
    """
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(heap_bytes))
    # eprt uses none of NVSHMEM's collectives, which alone need multicast.
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    # A card's writes must not overtake each other: the word that tells of bytes comes last.
    os.environ.setdefault("NVSHMEM_IB_ENABLE_RELAXED_ORDERING", "0")
    if one_host:
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")


def cuda_home() -> Path:
    """Where a CUDA toolkit may be."""
    return Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
