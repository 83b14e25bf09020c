"""How launches of the normal mode are laid out."""

from itertools import product
from typing import Any

import pytest

from eprt.ep.nvlink.normal_grid import (
    ALONE_SMS,
    COMBINE_WARP_BYTES,
    MAX_SMS,
    WARPS,
    Grid,
    combine_grid,
    dispatch_grid,
)
from eprt.ep.nvlink.structs import RECV, SEND
from eprt.gpu import jit


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 32])
@pytest.mark.parametrize("grouped", [False, True])
def test_grids_of_normal_mode_fit_the_machine(num_ranks, grouped):
    """Shared memory, thread blocks and warps suffice for any row, number of SMs and phases."""
    for num_sms, phases, row_bytes, shared in product(
        (None, 1, 3, 24, 64), (1, 2, 3), (32, 2016, 14336, 131072), (152, 216)
    ):
        asked: dict[str, Any] = {"phases": phases, "shared_bytes": shared << 10, "num_sms": num_sms, "gpu_sms": 60}
        asked["grouped"] = grouped
        for cast in (0, 512):
            grid = dispatch_grid(num_ranks, 8, x_bytes=row_bytes, cast_scales=cast, **asked)
            most = num_sms or (60 if grouped and phases == 3 else MAX_SMS)
            check_grid(grid, most, row_bytes, shared << 10, 512 * 4 if cast else 0, both=grouped and phases == 3)
        grid = combine_grid(num_ranks, 8, row_bytes=row_bytes, **asked)
        check_grid(grid, most, row_bytes, shared << 10, 0, both=phases == 3)
        assert grid.recv_warps * COMBINE_WARP_BYTES <= shared << 10 and 2 * grid.piece_bytes <= COMBINE_WARP_BYTES


def check_grid(grid: Grid, most: int, row_bytes: int, shared: int, scales: int, both: bool) -> None:
    assert 1 <= grid.blocks <= most
    assert 0 <= grid.send_blocks < grid.blocks and (both or not grid.send_blocks)
    assert 1 <= grid.send_warps <= grid.recv_warps <= WARPS
    assert not both or grid.send_blocks or grid.send_warps < grid.recv_warps
    assert grid.piece_bytes % 512 == 0 and grid.send_warps * 2 * (grid.piece_bytes + scales) <= shared
    pieces = -(-row_bytes // grid.piece_bytes)
    assert (pieces - 1) * grid.piece_bytes < row_bytes <= pieces * grid.piece_bytes


def test_the_grids_constants_are_those_of_the_kernels():
    texts = [jit.read_source(name) for name in ("normal_dispatch", "normal_combine")]
    assert all(f"constexpr int kWarps = {WARPS};" in text for text in texts)
    assert "constexpr int kSlots = 2;" in texts[0]
    assert f"constexpr int kWarpBytes = {COMBINE_WARP_BYTES};" in texts[1]
    assert "constexpr int kRowSlots = 2;" in texts[1]


V3 = {"grouped": True, "shared_bytes": 216 << 10, "num_sms": None, "gpu_sms": 132}


def grids(num_ranks: int, phases: int, **given: Any) -> list[Grid]:
    """Of dispatch in bf16 and fp8 and of combine, for rows of DeepSeek-V3 by expert."""
    asked: Any = {**V3, "phases": phases, **given}
    dispatches = [dispatch_grid(num_ranks, 8, x_bytes=14336, cast_scales=scales, **asked) for scales in (0, 56)]
    return [*dispatches, combine_grid(num_ranks, 8, row_bytes=14336, **asked)]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_only_a_launch_that_nothing_runs_beside_takes_more_multiprocessors(num_ranks):
    for phases in (SEND, RECV):
        assert all(grid.blocks <= MAX_SMS for grid in grids(num_ranks, phases))
    assert all(grid.blocks <= MAX_SMS for grid in grids(num_ranks, SEND | RECV, grouped=False))
    for grid in grids(num_ranks, SEND | RECV):
        assert grid.blocks == ALONE_SMS > MAX_SMS
        assert 0 < grid.send_blocks < grid.blocks // 2, "no more than keep the link busy"


def test_no_launch_takes_more_multiprocessors_than_there_are_or_than_it_was_told():
    for phases in (SEND, RECV, SEND | RECV):
        assert all(grid.blocks <= 16 for grid in grids(2, phases, gpu_sms=16))
        assert all(grid.blocks == 7 for grid in grids(2, phases, num_sms=7))
