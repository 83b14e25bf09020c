"""Backends on a GPU that is not there (tests/fake_gpu.py), rank 0 of 2."""

from typing import Any

from eprt.ep.config import EPConfig
from eprt.ep.nvlink.backend import NvlinkBackend
from eprt.ep.nvlink.low_latency_backend import NvlinkLowLatencyBackend
from eprt.ep.nvlink.normal_backend import NvlinkNormalBackend
from eprt.ep.nvlink.options import NvlinkOptions
from tests.fake_gpu import Group

T, HIDDEN, K, EXPERTS = 64, 256, 4, 8
MODES = ("low_latency", "normal")
BACKENDS = {"low_latency": NvlinkLowLatencyBackend, "normal": NvlinkNormalBackend}


def make(mode: str, options: dict[str, Any] | None = None, **fields: Any) -> NvlinkBackend:
    """fields: of EPConfig. Normal mode has a static bound unless told otherwise: nothing waits for counts."""
    config = EPConfig(HIDDEN, EXPERTS, K, T, mode=mode, device="cuda", **fields)
    default = {"max_recv_rows": 64} if mode == "normal" else {}
    return BACKENDS[mode](config, Group(0, 2), NvlinkOptions(**(default if options is None else options)))
