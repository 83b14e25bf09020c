"""Loads the native library once; an error names the remedy when the library is missing.

Knows nothing of what the operators mean: the neighbouring modules do.
"""

import functools
from pathlib import Path

import torch

from eprt import env
from eprt.native_library import find_native_library

ISA_NAMES = ("scalar", "avx2", "avx512", "amx")


def library_path() -> Path | None:
    """Where eprt_ops.so lies, or None."""
    return find_native_library("eprt_ops.so")


@functools.cache
def load():
    """The operator namespace torch.ops.eprt. ImportError names the remedy when the library was not built."""
    path = library_path()
    if path is None:
        raise ImportError(
            "eprt's native library is not built; run `make build` (or pip install --no-build-isolation -e .)"
        )
    torch.ops.load_library(str(path))
    torch.ops.eprt.own_threads(env.openmp_sleeps())
    isa = env.get("EPRT_CPU_ISA")
    if isa is not None:
        set_isa(isa)
    return torch.ops.eprt


def isa() -> str:
    """The instruction set that the CPU kernels use now: scalar, avx2, avx512 or amx."""
    return ISA_NAMES[load().cpu_isa()]


def detected_isa() -> str:
    """The widest instruction set that this CPU supports."""
    return ISA_NAMES[load().cpu_isa_detected()]


def set_isa(name: str) -> None:
    """Lowers (or restores) the instruction set. ValueError when this CPU lacks it."""
    level = ISA_NAMES.index(name)
    ops = torch.ops.eprt
    if level > ops.cpu_isa_detected():
        raise ValueError(f"EPRT_CPU_ISA={name}: this CPU has only {ISA_NAMES[ops.cpu_isa_detected()]}")
    ops.set_cpu_isa(level)
