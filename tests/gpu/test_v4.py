"""DeepSeek V4 on GPUs: operators, transformers' log-probabilities, the CPU's tokens, drafts, ranks, a server."""

import re
from typing import Any

import httpx
import pytest

from tests.gpu.gpus import MOST_RANKS, need_gpus

pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 1, reason="needs an NVIDIA GPU")]

CASES: tuple[Any, ...] = ()
if MOST_RANKS:
    from tests.gpu import cases_group_linear, cases_v4_attention, cases_v4_rows

    small = (*cases_group_linear.ALL, *cases_v4_rows.SMALL, *cases_v4_attention.SMALL)
    large = (case for case in (*cases_v4_rows.ALL, *cases_v4_attention.ALL) if case not in small)
    CASES = (*small, *(pytest.param(case, marks=pytest.mark.long) for case in large))


@pytest.mark.one_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_operators(case):
    from tests.gpu.draw import Draw

    case(Draw("cuda"))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> str:
    from tests.gpu.cases_v4 import save_goldens

    root = tmp_path_factory.mktemp("v4")
    save_goldens(root)
    return str(root)


@pytest.mark.one_gpu
@pytest.mark.parametrize("case", ["goldens", "same_tokens_as_on_the_cpu", "other_caches", "short_of_pages"])
def test_tiny_model(case, root):
    from eprt import EPGroup
    from tests.gpu import cases_v4

    getattr(cases_v4, case)(EPGroup.single(), root)


@pytest.mark.one_gpu
@pytest.mark.parametrize("case", ["answers_questions", "dummy_weights"])
def test_demo_model(case):
    from eprt import EPGroup
    from tests.gpu import cases_v4

    getattr(cases_v4, case)(EPGroup.single())


@pytest.mark.long
def test_two_ranks(root):
    """float32 goes through host memory, so ranks may share a GPU."""
    from tests.ranks.launch import run_ranks

    print(run_ranks(2, "tests.gpu.cases_v4:same_tokens_as_on_the_cpu", timeout_s=280, root=root))


def test_two_ranks_answer_over_nvlink():
    need_gpus(2)
    from tests.ranks.launch import run_ranks

    print(run_ranks(2, "tests.gpu.cases_v4:answers_questions", timeout_s=280))


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=pytest.mark.one_gpu), pytest.param(2, marks=pytest.mark.long)]
)
def test_a_server_answers(num_ranks):
    """Over HTTP, with drafts, among its answers to others; experts move meanwhile."""
    need_gpus(num_ranks)
    from eprt.serve.running import RunningServer
    from examples.demo_model.evaluate import ask_server
    from examples.demo_model.score import held_out_questions, score
    from tests.paths import DEMO_V4

    samples = held_out_questions(44, seed=3)
    flags = "--device", "cuda", "--num-speculative-tokens", "1", "--kv-cache-gb", "0.2", "--num-redundant-experts", "32"
    with RunningServer(DEMO_V4, num_ranks, *flags) as server:
        result = score(samples, ask_server(server.url, samples, concurrency=8, timeout_s=120))
        text = httpx.get(f"{server.url}/metrics").text
    print(num_ranks, result)
    accepted = re.findall(r"^eprt_accepted_tokens_total(?:\{.*\})? ([\d.e+]+)$", text, re.M)
    assert result["accuracy"] > 0.9 and sum(map(float, accepted)) > len(samples), accepted
