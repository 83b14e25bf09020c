"""Masks of tokens against their oracle, by one thread and by several, and what is refused."""

import numpy as np
import pytest
import torch

from eprt.ops import mask_tokens
from tests import reference_ops as reference


def make(rows: int, vocab: int, chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(vocab)
    bits_YB = rng.integers(0, 256, (len(chosen), -(-vocab // 32) * 4), dtype=np.uint8)
    bits_YB[:1], bits_YB[1:2] = 0, 255
    bits_YB[2:3, ::8] = 0
    wide = torch.from_numpy(rng.normal(size=(rows, vocab + 5)).astype(np.float32))
    return wide[:, :vocab], torch.from_numpy(bits_YB), torch.tensor(chosen, dtype=torch.int64)


@pytest.mark.parametrize(
    ("rows", "vocab", "chosen"),
    [
        (4, 640, [3, 0, 1]),
        (1, 1, [0]),
        (2, 33, [1]),
        (3, 31, [0, 1, 2]),
        (40, 9000, list(range(39, 0, -1))),
        (2, 64, []),
    ],
)
def test_kernel_equals_the_oracle(isa, rows, vocab, chosen):
    logits_XV, bits_YB, row_Y = make(rows, vocab, chosen)
    logits_XV[0, 0] = torch.nan
    want_XV = reference.mask_tokens(logits_XV, bits_YB, row_Y)
    beside = logits_XV.as_strided((rows, vocab + 5), (vocab + 5, 1))[:, vocab:].clone()
    mask_tokens(logits_XV, bits_YB, row_Y)
    assert torch.equal(logits_XV.nan_to_num(nan=1e9), want_XV.nan_to_num(nan=1e9))
    assert torch.equal(logits_XV.as_strided((rows, vocab + 5), (vocab + 5, 1))[:, vocab:], beside)


def test_what_does_not_fit_is_refused():
    logits_XV, bits_YB, row_Y = make(4, 640, [0, 1])
    with pytest.raises(ValueError, match=r"logits must be float32"):
        mask_tokens(logits_XV.double(), bits_YB, row_Y)
    with pytest.raises(ValueError, match=r"masks \(2, 76\) do not fit 2 rows of 640 logits"):
        mask_tokens(logits_XV, bits_YB[:, :-4].contiguous(), row_Y)
    with pytest.raises(ValueError, match=r"masks \(2, 80\) do not fit 1 rows of 640 logits"):
        mask_tokens(logits_XV, bits_YB, row_Y[:1])
    with pytest.raises(RuntimeError, match=r"row_Y\[1\] is 4"):
        mask_tokens(logits_XV, bits_YB, torch.tensor([0, 4]))
