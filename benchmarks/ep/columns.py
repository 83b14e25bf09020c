"""Columns of one GPU call beside its peers: the same in all tables of bench_ep, whose docstring explains them."""

from typing import Any

from torch import Tensor

from benchmarks.tools.timing import Timing
from eprt import EPGroup
from eprt.ep.nvlink.low_latency_backend import NvlinkLowLatencyBackend
from eprt.ep.reference import dequantize

LINK_GB_S = 450.0  # one GPU's NVLink, one way


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def compared(
    times: dict[str, Timing], kernels: dict[str, float], logical_bytes: int, floor_us: float
) -> dict[str, Any]:
    """Columns for one call of all competitors."""
    us = times["eprt"].median_s * 1e6
    row: dict[str, Any] = {}
    for name, timing in times.items():
        row |= timing.columns(name)
        if name in kernels:
            row[f"{name}_kernel_us"] = kernels[name]
    row["GB_s"] = logical_bytes / us / 1e3
    for name in times:
        if name != "eprt":
            row[f"to_{name}"] = times["eprt"].median_s / times[name].median_s
            if name in kernels:
                row[f"kernel_to_{name}"] = kernels["eprt"] / kernels[name]
    return row | {"floor_us": floor_us, "to_floor": us / floor_us}


def identity_error(
    group: EPGroup, backend: NvlinkLowLatencyBackend, x_TH: Tensor, slots: Tensor, weights: Tensor
) -> float:
    """||out - ref|| / ||ref|| of a dispatch and combine around experts that return what they get; ref in fp32 from the
    tokens as they were. The largest over the ranks."""
    handle, received = backend.dispatch(x_TH, slots, weights)
    scale_RG = received.scale_RG
    y_RH = received.x_RH if scale_RG is None else dequantize(received.x_RH, scale_RG).to(x_TH.dtype)
    out_TH = backend.combine(y_RH, handle).float()
    ref_TH = x_TH.float() * weights.sum(1, keepdim=True)
    return max(group.allgather(float((out_TH - ref_TH).norm() / ref_TH.norm().clamp_min(1e-30))))
