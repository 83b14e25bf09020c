"""DeepSeek V4's experts on GPUs: gates, tables by token id, cut activations, fp4 weights; EPMoE on 1 and 2 ranks."""

from typing import Any

import pytest

from tests.gpu.gpus import MOST_RANKS, at_ranks, need_gpus

pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 1, reason="needs an NVIDIA GPU")]

CASES: tuple[Any, ...] = ()
if MOST_RANKS:
    from tests.gpu import cases_v4_experts

    CASES = cases_v4_experts.ALL


@pytest.mark.one_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_operators(case):
    from tests.gpu.draw import Draw

    case(Draw("cuda"))


@pytest.mark.parametrize("num_ranks", at_ranks(1, 2))
@pytest.mark.parametrize("wide", [False, True])
def test_layers(wide, num_ranks):
    """float32 goes through host memory, hence MPI."""
    need_gpus(num_ranks)
    from tests.ranks.launch import run_ranks

    print(run_ranks(num_ranks, "tests.gpu.cases_v4_moe:layers", timeout_s=150, wide=wide))
