"""by_device: one operator, an implementation per kind of device. The first argument, a tensor, says which.

The CPU functions are the contract: signature, docstring, checks. A device's module has functions of the same names and
signatures. It is imported at the first tensor of that device, and its docstrings name any further requirements.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

Operator = TypeVar("Operator", bound=Callable[..., Any])

# torch's device type -> module.
_MODULES = {"cuda": "eprt.ops.cuda"}


def by_device(cpu: Operator) -> Operator:
    """The operator that calls `cpu` for CPU tensors, and the function of that name in a device's module for others."""

    @functools.wraps(cpu)
    def call(x, *args, **kwargs):
        device = x.device.type
        if device == "cpu":
            return cpu(x, *args, **kwargs)
        return getattr(implementations(device), cpu.__name__)(x, *args, **kwargs)

    return call  # type: ignore[return-value]


def gpu_only(name: str) -> Callable[..., Any]:
    """An operator that only devices' modules have."""

    def refuse(x, *args, **kwargs):
        raise ValueError(f"ops.{name} computes on GPUs only, its rows are on the CPU")

    refuse.__name__ = name
    return by_device(refuse)


@functools.cache
def implementations(device: str) -> Any:
    """The module for a kind of device. ImportError names what is missing; ValueError names a device without module."""
    if device not in _MODULES:
        raise ValueError(f"eprt has no operators for device {device!r}; there are cpu, {', '.join(_MODULES)}")
    try:
        return import_module(_MODULES[device])
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(
            "eprt's GPU operators need Triton: pip install triton (CUDA builds of torch bring it)"
        ) from None
