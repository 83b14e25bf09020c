"""Products of few fp8 rows whose K clusters of thread blocks split: Hopper only."""

import pytest
import torch
from torch import Tensor

from eprt.gpu.cluster_product import PADDED_TO, ClusterTiling, cluster_product
from eprt.ops import cuda
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.tuning import tuned_dense
from eprt.ops.weight import Weight, quantize_fp8
from tests.gpu.draw import ROUNDING, Draw, near

TILINGS = (
    ClusterTiling(1, 1, 1, 4),
    ClusterTiling(1, 1, 8, 3),
    ClusterTiling(2, 1, 3, 6),
    ClusterTiling(1, 2, 2, 4),
    ClusterTiling(3, 1, 5, 5),
    ClusterTiling(2, 2, 4, 4),
)
SHAPES = ((64, 128), (200, 640), (1028, 2048))  # one step of K for up to eight thread blocks; tiles past the end of N


def _needs_hopper(draw: Draw) -> None:
    if draw.device != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs wgmma, which only Hopper has")


def _weight(draw: Draw, n: int, k: int) -> Weight:
    fp8 = quantize_fp8(draw.normal(n, k, scale=k**-0.5).cpu())
    assert fp8.scale is not None
    return Weight(fp8.data.to(draw.device), fp8.scale.to(draw.device))


def _product(data_PK: Tensor, scale_PG: Tensor, weight: Weight, rows: int, tiling: ClusterTiling) -> Tensor:
    assert weight.scale is not None
    return cluster_product(data_PK, scale_PG, weight.data, weight.scale, rows, tiling)


def _oracle(data_MK: Tensor, scale_MG: Tensor, weight: Weight) -> Tensor:
    rows = data_MK.float() * scale_MG.repeat_interleave(128, 1)
    return (rows.double() @ weight.dequantize().double().T).float()


def every_tiling(draw: Draw) -> None:
    """Rows of padding hold NaN, and outputs lie where NaN was; neither may show."""
    _needs_hopper(draw)
    for n, k in SHAPES:
        weight = _weight(draw, n, k)
        for rows in (1, 16, 17, 64, 65, 100, 128):
            data, scale = quantize_rows(draw.normal(rows, k, dtype=torch.bfloat16), padded_to=PADDED_TO)
            data.view(torch.uint8)[rows:], scale[rows:] = 0x7F, float("nan")
            want = _oracle(data[:rows], scale[:rows], weight)
            for tiling in TILINGS:
                torch.full((rows, n), float("nan"), dtype=torch.bfloat16, device=draw.device)
                got = _product(data, scale, weight, rows, tiling)
                near(got, want, ROUNDING[torch.bfloat16], f"{tiling} {rows}x{n}x{k}")
    assert _product(data[:0], scale[:0], weight, 0, TILINGS[0]).shape == (0, n)


def stacks(draw: Draw) -> None:
    """Several matrices at once, each with columns of its own: the bits of one product after another."""
    _needs_hopper(draw)
    num, n, k = 3, 256, 640
    whole = _weight(draw, num * n, k)
    assert whole.scale is not None
    stack = Weight(whole.data.view(num, n, k), whole.scale.view(num, n // 128, k // 128))
    for rows in (1, 16, 17, 64, 100, 128):
        data, scale = quantize_rows(draw.normal(rows, num * k, dtype=torch.bfloat16), padded_to=PADDED_TO)
        data.view(torch.uint8)[rows:], scale[rows:] = 0x7F, float("nan")
        for tiling in (each for each in TILINGS if n % each.tile == 0):
            got = _product(data, scale, stack, rows, tiling)
            for i in range(num):
                columns = data[:, i * k : (i + 1) * k].contiguous(), scale.T[5 * i : 5 * i + 5].contiguous().T
                want = _product(*columns, stack.matrix(i), rows, tiling)
                assert torch.equal(got[:, i * n : (i + 1) * n], want), (rows, tiling, i)
    with pytest.raises(ValueError, match="do not fit"):
        _product(data, scale, stack, rows, ClusterTiling(3, 1, 5, 5))


def replays(draw: Draw) -> None:
    """In a CUDA graph, behind the kernel that writes its rows: the same bits each time, of the rows of that time."""
    _needs_hopper(draw)
    weight, x = _weight(draw, 1024, 4096), draw.normal(48, 4096, dtype=torch.bfloat16)

    def product() -> Tensor:
        data, scale = quantize_rows(x, padded_to=PADDED_TO)
        return _product(data, scale, weight, len(x), ClusterTiling(2, 1, 4, 4))

    product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [product() for _ in range(8)]
    for _ in range(20):
        x.copy_(draw.normal(48, 4096, dtype=torch.bfloat16))
        want = product()
        graph.replay()
        for got in outputs:
            assert torch.equal(got, want)


def tuned_shapes(draw: Draw) -> None:
    """What linear chooses for products of DeepSeek V3 and V4, as many rows as are measured and one less."""
    _needs_hopper(draw)
    for n, k in ((2112, 7168), (7168, 2048), (1536, 4096), (4096, 8192)):
        weight, device = _weight(draw, n, k), torch.device("cuda", torch.cuda.current_device())
        for rows in (1, 15, 16, 31, 64, 127, 128, 129):
            x = draw.normal(rows, k, dtype=torch.bfloat16)
            data, scale = quantize_rows(x)
            chosen = tuned_dense(device, n, k, rows)
            got, want = cuda.linear(x, weight), _oracle(data, scale, weight)
            near(got, want, ROUNDING[torch.bfloat16], f"linear {rows}x{n}x{k} by {chosen}")
            near(
                cuda.linear(x, weight, out_dtype=torch.float32),
                want,
                ROUNDING[torch.bfloat16],
                f"{rows}x{n}x{k} to fp32",
            )


ALL = (every_tiling, stacks, replays, tuned_shapes)
