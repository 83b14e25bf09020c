"""DeepSeek-V4 on GPUs: operators of attention, cache and streams."""

import pytest
import torch

from tests.gpu.gpus import MOST_RANKS

pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 1, reason="needs an NVIDIA GPU")]

if MOST_RANKS:
    from tests.gpu import cases_v4_attention, cases_v4_rows

    OPERATORS = (*cases_v4_rows.ALL, *cases_v4_attention.ALL)
else:
    OPERATORS = ()


@pytest.mark.one_gpu
@pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case.__name__)
def test_operators(case):
    from tests.gpu.draw import Draw

    case(Draw("cuda"))
    torch.cuda.synchronize()
