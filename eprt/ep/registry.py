"""Backends by name. They are imported on first use, so that a machine without GPUs never imports GPU code."""

from pkgutil import resolve_name
from typing import Any

import torch

from eprt.ep.api import Backend
from eprt.ep.config import EPConfig
from eprt.ep.group.group import EPGroup

# Name -> mode -> "module:class". Constructors take (config, group), and options where a backend has some of its own.
_BACKENDS = {
    "reference": dict.fromkeys(("normal", "low_latency"), "eprt.ep.reference:ReferenceBackend"),
    "cpu": dict.fromkeys(("normal", "low_latency"), "eprt.ep.cpu.backend:CpuBackend"),
    "nvlink": {
        "normal": "eprt.ep.nvlink.normal_backend:NvlinkNormalBackend",
        "low_latency": "eprt.ep.nvlink.low_latency_backend:NvlinkLowLatencyBackend",
    },
    # Prompts, whose calls are few and long, go through host memory.
    "nvshmem": {
        "normal": "eprt.ep.staged:StagedBackend",
        "low_latency": "eprt.ep.nvlink.nvshmem_backend:NvshmemBackend",
    },
    "local": dict.fromkeys(("normal", "low_latency"), "eprt.ep.local:LocalBackend"),
    "staged": dict.fromkeys(("normal", "low_latency"), "eprt.ep.staged:StagedBackend"),
}


def make_backend(name: str, config: EPConfig, group: EPGroup, options: Any = None) -> Backend:
    """Builds backend `name`; "auto" chooses one for the device and dtype. Collective over the group.

    options: of that backend alone, for example eprt.ep.nvlink.options.NvlinkOptions.

    Raises ValueError naming the backends when there is none of this name.
    """
    name = _fitting_name(config, group) if name == "auto" else name
    if name not in _BACKENDS:
        raise ValueError(
            f"[rank {group.rank}/{group.size}] no backend {name!r}; there are: auto, {', '.join(_BACKENDS)}"
        )
    backend = resolve_name(_BACKENDS[name][config.mode])
    return backend(config, group) if options is None else backend(config, group, options)


def _fitting_name(config: EPConfig, group: EPGroup) -> str:
    """On GPUs: nothing is sent by one rank alone; NVLink and NVSHMEM move bfloat16, host memory anything."""
    if config.device == "cpu":
        return "cpu"
    if group.size == 1:
        return "local"
    if config.dtype != torch.bfloat16:
        return "staged"
    wire = getattr(group, "gpu_wire", "")  # of a WireGroup
    return wire if wire and group.num_nodes > 1 else "nvlink"
