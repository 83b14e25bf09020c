"""The grouped product in tiles of every height."""

import torch
from torch import Tensor

from eprt.ops.cuda.grouped_gemm import grouped_gemm
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.tuning import Tiling
from eprt.ops.weight import quantize_fp8
from tests.gpu.cases_products import Counters
from tests.gpu.draw import Draw, near, weight_on


def tile_heights(draw: Draw) -> None:
    """A row's result is the same in a tile of any height: alone, among others, at the end of an expert's rows."""
    count = torch.tensor([21, 0, 16, 70, 33, 1], dtype=torch.int32, device=draw.device)
    weight = weight_on(draw.device, quantize_fp8(draw.normal(6, 256, 200, scale=0.07).cpu()))
    data, scale = quantize_rows(draw.normal(146, 200))

    def product(block_m: int, gated: bool, signal: Counters | None = None) -> Tensor:
        tiling = Tiling(block_m, 128, 128, 8 if block_m > 64 else 4, 2, 2)
        same = {"x_scale_RG": scale, "recv_count_E": count, "dtype": torch.float32}
        return grouped_gemm(data, weight, gated=gated, tiling=tiling, signal=signal, **same)[0][:141]

    for gated in (False, True):
        want = product(16, gated)
        for block_m in (32, 64, 128):
            near(product(block_m, gated), want, 1e-6, f"tiles of {block_m} rows, {gated=}")
    signal = Counters(torch.zeros(6 * 3, dtype=torch.int32, device=draw.device), 32, 3)
    near(product(64, False, signal), product(16, False), 1e-6, "tiles of 32 that tell")
    ready = (count[:, None] > torch.arange(3, device=draw.device) * 32) * 256
    assert torch.equal(signal.counter.view(6, 3), ready.int()), signal.counter


ALL = (tile_heights,)
