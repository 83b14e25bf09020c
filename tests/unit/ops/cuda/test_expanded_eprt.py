"""Which prompts eprt's own kernel takes."""

import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from eprt.ops.cuda import expanded_eprt


def queries(nope: int = 128, rope: int = 64, value: int = 128, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    q = torch.zeros(3, 4, nope + rope, dtype=dtype)
    return [q[..., :nope], torch.zeros(3, 4, rope, dtype=dtype), torch.zeros(7, 4, nope + value, dtype=dtype)]


@pytest.mark.parametrize(
    "inputs, reason",
    [
        (queries(dtype=torch.float32), "bfloat16"),
        (queries(nope=64), "not 64 \\+ 64 and 128"),
        (queries(rope=32), "not 128 \\+ 32 and 128"),
        (queries(value=64), "not 128 \\+ 64 and 64"),
        ([torch.zeros(3, 4, 130, dtype=torch.bfloat16)[..., :128], *queries()[1:]], "multiples of 64 values"),
        (queries(), "on GPUs"),
    ],
)
def test_what_it_refuses(inputs, reason):
    found = expanded_eprt.refusal(*inputs)
    assert found is not None and re.search(reason, found)
