"""The grouped product of bfloat16 experts in large tiles: Hopper only. In the emulation: tests/emulated."""

import pytest
import torch
from torch import Tensor

from eprt.ep.group.group import EPGroup
from eprt.gpu import grouped_product
from eprt.ops import cuda
from eprt.ops.cuda.grouped_gemm import grouped_gemm
from eprt.ops.weight import Weight
from tests import reference_ops as reference
from tests.gpu.draw import Draw, experts_at, near, weight_on

# Rows of each expert: none, one, whole tiles and boxes, more than a tile; and K and N that end inside a tile.
CASES = (
    ((16,), 256, 64),
    ((21, 0, 16, 70, 33, 1), 200, 200),
    ((177, 176, 193, 1000, 3), 1028, 1024),
    ((360, 0, 700, 30), 776, 256),
    (tuple(range(0, 200, 5)), 512, 448),
)


def _needs_hopper(draw: Draw) -> None:
    if draw.device != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs wgmma, which only Hopper has")


def large_tiles(draw: Draw) -> None:
    """As grouped_gemm; rows past the last expert's stay as they were; on any number of SMs the same bits."""
    _needs_hopper(draw)
    for counts, n, k in CASES:
        for gated in (False, True):
            _check_tiles(draw, counts, n // 8 * 8 if gated else n, k, gated, (132, 132, 2))


def few_tiles(group: EPGroup) -> None:
    """For compute-sanitizer: tiles of rows singly and in pairs, ends of K, N and rows inside a tile."""
    for gated in (False, True):
        _check_tiles(Draw("cuda"), (21, 0, 200, 360), 264, 136, gated, (4,))


def _check_tiles(draw: Draw, counts: tuple[int, ...], n: int, k: int, gated: bool, sms: tuple[int, ...]) -> None:
    w = draw.normal(len(counts) + 1, n * (1 + gated), k, dtype=torch.bfloat16, scale=k**-0.5)
    x = draw.normal(sum(counts) + 13, k, dtype=torch.bfloat16)
    count = torch.tensor(counts, dtype=torch.int32, device=draw.device)
    matrix = torch.randperm(len(w), generator=draw.generator)[: len(counts)].int().to(draw.device)
    outputs = []
    for num_sms in sms:
        y = torch.full((len(x), n), float("nan"), dtype=torch.bfloat16, device=draw.device)
        grouped_product.grouped_product(x, w, count, matrix, y, gated, num_sms)
        outputs.append(y)
    y, filled = outputs[0], sum(counts)
    assert y[filled:].isnan().all() and all(torch.equal(y[:filled], other[:filled]) for other in outputs)
    want, _ = grouped_gemm(x, Weight(w), recv_count_E=count, matrix_E=matrix, gated=gated)
    near(y[:filled], want[:filled], 1e-3, f"rows {counts} of {n} x {k}, {gated=}")


def replayed_experts(draw: Draw) -> None:
    """Both products in a CUDA graph, whose counts, placement and rows change between replays."""
    _needs_hopper(draw)
    hidden, width, num_experts, rows = 512, 256, 8, 1024
    w13 = Weight(draw.normal(10, 2 * width, hidden, scale=hidden**-0.5).cpu().bfloat16())
    w2 = Weight(draw.normal(10, hidden, width, scale=width**-0.5).cpu().bfloat16())
    on_gpu = weight_on(draw.device, w13), weight_on(draw.device, w2)
    x, count, buffer = (
        draw.normal(rows, hidden, dtype=torch.bfloat16),
        torch.zeros(num_experts, dtype=torch.int32, device=draw.device),
        torch.zeros(num_experts, dtype=torch.int32, device=draw.device),
    )

    def computed() -> Tensor:
        return cuda.grouped_experts(x, count, *on_gpu, None, buffer)

    computed()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = computed()
    for _ in range(4):
        x.copy_(draw.normal(rows, hidden, dtype=torch.bfloat16))
        counts = torch.bincount(draw.integers(0, num_experts, rows - 24).cpu(), minlength=num_experts).int()
        buffers = torch.randperm(10, generator=draw.generator)[:num_experts].int()
        count.copy_(counts)
        buffer.copy_(buffers)
        graph.replay()
        want = reference.grouped_experts(x.cpu(), counts, *(experts_at(w, buffers) for w in (w13, w2)))
        near(y[: rows - 24], want[: rows - 24], 8e-3, "replayed experts")


ALL = (large_tiles, replayed_experts)
