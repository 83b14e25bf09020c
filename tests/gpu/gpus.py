"""How many GPUs this machine has, which half of the suite a number of ranks is in, and a case run on some of the GPUs.

Every test of this folder is in one half: the long one if it has the mark `long`, else the quick one. Tests with the
mark `one_gpu` use one GPU, so that the runner (benchmarks/suite) may run several of them at once.
"""

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")

# Set by the runner: a process that it starts may see one GPU of several (conftest.py).
TOTAL_VARIABLE = "GPU_SUITE_GPUS"
LONG_EPOCHS = 10_000


def count_gpus() -> int:
    if TOTAL_VARIABLE in os.environ:
        return int(os.environ[TOTAL_VARIABLE])
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


NUM_GPUS = count_gpus()


def at_ranks(*cases: Any, num_gpus: int = NUM_GPUS) -> list:
    """Parameters of a test: numbers of ranks, or tuples that begin with one.

    One rank, and the most that have a GPU each (else the fewest), are in the quick half, others in the long half.
    num_gpus: of this machine.
    """
    sizes = [case[0] if isinstance(case, tuple) else case for case in cases]
    most = max((size for size in sizes if size <= num_gpus), default=min(sizes))
    params = []
    for case, size in zip(cases, sizes):
        marks = [pytest.mark.one_gpu] if size == 1 else [] if size == most else [pytest.mark.long]
        params.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    return params


def need_gpus(num_ranks: int) -> None:
    """Skips the test where there are fewer."""
    if num_ranks > NUM_GPUS:
        pytest.skip(f"needs {num_ranks} GPUs, there are {NUM_GPUS}")


def run_case(num_ranks: int, target: str, **kwargs) -> str:
    """target: "module:function" of tests.gpu. Skips the test where there are too few GPUs."""
    need_gpus(num_ranks)
    from tests.gpu.launch import run_gpu_ranks

    kwargs.setdefault("timeout_s", 120 if num_ranks <= 4 else 300)  # each rank knows the tokens of all
    return run_gpu_ranks(num_ranks, f"tests.gpu.{target}", **kwargs)
