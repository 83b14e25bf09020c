"""EPMoE in transformers' models on GPUs: blocks and models of every kind, fp8, recorded graphs, torch.compile."""

from typing import Any

import pytest

from tests.gpu.gpus import MOST_RANKS, at_ranks, need_gpus

pytest.importorskip("triton")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 1, reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("num_ranks", at_ranks(1, 2, 4))
def test_models_of_transformers(num_ranks, tmp_path):
    """float32 goes through host memory, hence MPI."""
    run(num_ranks, "quick", root=str(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_programs_of_inductor_in_recorded_graphs(num_ranks):
    run(num_ranks, "long")


def run(num_ranks: int, case: str, **kwargs: Any) -> None:
    need_gpus(num_ranks)
    from tests.ranks.launch import run_ranks

    print(run_ranks(num_ranks, f"tests.gpu.cases_hf:{case}", timeout_s=200, **kwargs))
