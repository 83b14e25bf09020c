"""The DeepEP face on real GPUs, low latency and normal mode, against an oracle."""

import pytest

torch = pytest.importorskip("torch")

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 2, reason="needs two NVIDIA GPUs with peer access")]


def run(num_ranks: int, case: str, **kwargs) -> str:
    if num_ranks > NUM_GPUS:
        pytest.skip(f"needs {num_ranks} GPUs, there are {NUM_GPUS}")
    from tests.gpu.launch import run_gpu_ranks

    return run_gpu_ranks(num_ranks, f"tests.gpu.{case}", **kwargs)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_low_latency(num_ranks):
    """All ways to call; hooks in flight; graphs; scale formats; statistics; bad input; overlap; a rank that returns."""
    print(run(num_ranks, "cases_deep_ep:one_launch", seed=num_ranks, cases_per_shape=6))


@pytest.mark.parametrize("num_ranks, victim, before", [(2, 1, "dispatch"), (4, 0, "dispatch"), (4, 2, "combine")])
def test_the_others_go_on_when_a_rank_is_killed(num_ranks, victim, before):
    case = "cases_deep_ep:killed_rank"
    assert "went on after" in run(num_ranks, case, victim=victim, before=before, killed=(victim,))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_normal_mode(num_ranks):
    """Against the oracle; memory that runs low; memory that another stream still reads."""
    run(num_ranks, "cases_deep_ep_normal:one_launch", seed=num_ranks, cases_per_shape=6)
