"""by_device: one operator, an implementation per kind of device. The first argument, a tensor, says which.

The CPU's functions hold the contract: signature, docstring, checks. A device's module has functions of the same names
and signatures, is imported when its first tensor comes, and may ask more of its input where its own docstring says so.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

Operator = TypeVar("Operator", bound=Callable[..., Any])

# torch's device type -> module.
_MODULES = {"cuda": "eprt.ops.cuda"}


def by_device(cpu: Operator) -> Operator:
    """The operator that calls `cpu` for CPU tensors, and its namesake in a device's module for others."""

    @functools.wraps(cpu)
    def call(x, *args, **kwargs):
        device = x.device.type
        if device == "cpu":
            return cpu(x, *args, **kwargs)
        return getattr(implementations(device), cpu.__name__)(x, *args, **kwargs)

    return call  # type: ignore[return-value]


def gpu_only(name: str) -> Callable[..., Any]:
    """The operator that devices' modules have and CPUs do not."""

    def call(x, *args, **kwargs):
        device = x.device.type
        if device == "cpu":
            raise ValueError(f"ops.{name} computes on GPUs only, its rows are on the CPU")
        return getattr(implementations(device), name)(x, *args, **kwargs)

    call.__name__ = name
    return call


@functools.cache
def implementations(device: str) -> Any:
    """The module of a kind of device. ImportError says what it lacks; ValueError names a device there is none for."""
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
