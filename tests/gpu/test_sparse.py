"""DeepSeek-V3.2 on GPUs: operators, transformers' logits, the CPU's tokens, drafts, on 1 and 2 ranks."""

import pytest
import torch

from tests.gpu.gpus import MOST_RANKS

pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 1, reason="needs an NVIDIA GPU")]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> str:
    from tests.gpu.cases_sparse import save_goldens

    root = tmp_path_factory.mktemp("v32")
    save_goldens(root)
    return str(root)


@pytest.mark.one_gpu
def test_operators():
    from tests.gpu import cases_index_rows, cases_indexer
    from tests.gpu.draw import Draw

    for case in (*cases_indexer.ALL, *cases_index_rows.ALL):
        case(Draw("cuda"))
        torch.cuda.synchronize()


@pytest.mark.one_gpu
@pytest.mark.parametrize("case", ["goldens", "same_tokens_as_on_the_cpu", "other_formats"])
def test_one_gpu(case, root):
    from eprt import EPGroup
    from tests.gpu import cases_sparse

    getattr(cases_sparse, case)(EPGroup.single(), root)


def test_two_ranks(root):
    """float32 goes through host memory, so ranks may share a GPU."""
    from tests.ranks.launch import run_ranks

    print(run_ranks(2, "tests.gpu.cases_sparse:same_tokens_as_on_the_cpu", timeout_s=280, root=root))
