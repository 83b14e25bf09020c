"""Masks of tokens on a device, against the oracle. With TRITON_INTERPRET=1 the device may be the CPU."""

import torch

from eprt.ops import cuda
from tests import reference_ops as reference
from tests.gpu.draw import Draw


def token_masks(draw: Draw) -> None:
    for rows, vocab, chosen in ((3, 640, [2, 0]), (1, 97, [0]), (4, 2500, [0, 1, 2, 3]), (2, 64, [])):
        num_bytes = -(-vocab // 32) * 4
        bits = draw.integers(0, 256, len(chosen), num_bytes).to(torch.uint8)
        bits[:1], bits[1:2, :20] = 0, 255
        logits = draw.normal(rows, vocab + 8)[:, :vocab]  # rows of another stride
        row = torch.tensor(chosen, dtype=torch.int64, device=draw.device)
        want = reference.mask_tokens(logits.cpu(), bits.cpu(), row.cpu())
        cuda.mask_tokens(logits, bits, row)
        assert torch.equal(logits.cpu(), want), (rows, vocab)


ALL = (token_masks,)
