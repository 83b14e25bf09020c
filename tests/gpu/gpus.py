"""How many GPUs this machine has, and a case of this folder run on some of them."""

import pytest

torch = pytest.importorskip("torch")

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


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
