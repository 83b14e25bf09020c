"""How many ranks this machine has GPUs for, in which half of the suite they are, and a case run on some of the GPUs.

Every test of this folder is in one half: the long one if it has the mark `long`, else the quick one. Tests with the
mark `one_gpu` use one GPU, so that the runner (benchmarks/suite) may run several of them at once.

With EPRT_RANKS_PER_GPU above 1 ranks share GPUs (shared.py).
"""

import os
from typing import Any

import pytest

from tests.gpu.shared import RANKS_PER_GPU

torch = pytest.importorskip("torch")

# Set by the runner: a process that it starts may see one GPU of several (conftest.py).
TOTAL_VARIABLE = "GPU_SUITE_GPUS"
LONG_EPOCHS = 10_000 if RANKS_PER_GPU == 1 else 1_000


def count_gpus() -> int:
    if TOTAL_VARIABLE in os.environ:
        return int(os.environ[TOTAL_VARIABLE])
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


NUM_GPUS = count_gpus()
MOST_RANKS = NUM_GPUS * RANKS_PER_GPU


def at_ranks(*cases: Any, most_ranks: int = MOST_RANKS) -> list:
    """Parameters of a test: numbers of ranks, or tuples that begin with one.

    One rank, and the most that there are GPUs for (else the fewest), are in the quick half, others in the long half.
    most_ranks: of this machine.
    """
    sizes = [case[0] if isinstance(case, tuple) else case for case in cases]
    most = max((size for size in sizes if size <= most_ranks), default=min(sizes))
    params = []
    for case, size in zip(cases, sizes):
        marks = [pytest.mark.one_gpu] if size == 1 else [] if size == most else [pytest.mark.long]
        params.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    return params


def need_gpus(num_ranks: int) -> None:
    """Skips the test where there are fewer."""
    if num_ranks > MOST_RANKS:
        shared = f", for {RANKS_PER_GPU} ranks each" if RANKS_PER_GPU > 1 else ""
        pytest.skip(f"needs {num_ranks} GPUs, there are {NUM_GPUS}{shared}")


def not_shared(why: str) -> pytest.MarkDecorator:
    """A mark: skips the test where ranks share a GPU. why: what it says is then not so."""
    return pytest.mark.skipif(RANKS_PER_GPU > 1, reason=f"ranks share a GPU: {why}")


def run_case(num_ranks: int, target: str, **kwargs) -> str:
    """target: "module:function" of tests.gpu. Skips the test where there are too few GPUs."""
    need_gpus(num_ranks)
    from tests.gpu.launch import run_gpu_ranks

    kwargs.setdefault("timeout_s", 120 if num_ranks <= 4 else 300)  # each rank knows the tokens of all
    return run_gpu_ranks(num_ranks, f"tests.gpu.{target}", **kwargs)
