"""Products of groups of columns, in one launch and one after another."""

import torch

from eprt.ops import cuda
from eprt.ops.group_linear import group_by_group
from eprt.ops.weight import Weight, quantize_fp8, quantize_int8
from tests.gpu.draw import Draw


def group_products(draw: Draw) -> None:
    """Those of all groups are those of each group's own."""
    for dtype in (torch.float32, torch.bfloat16):
        for quantise in (Weight, quantize_fp8, quantize_int8):
            whole = quantise(draw.normal(3, 128, 256) / 16)
            if quantise is Weight:
                whole = Weight(whole.data.to(dtype))
            for rows in (1, 5):
                x = draw.normal(rows, 3 * 256, dtype=dtype)
                want = group_by_group(x, whole, cuda.linear)
                error = (cuda.group_linear(x, whole) - want).float().abs().max() / want.float().abs().max()
                assert error < 1e-2, (dtype, quantise.__name__, rows, error)
    assert cuda.group_linear(draw.normal(0, 3 * 256), Weight(draw.normal(3, 128, 256))).shape == (0, 3 * 128)


ALL = (group_products,)
