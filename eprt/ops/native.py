"""Loads the native library once and says plainly what to do when it is missing.

Knows nothing of the operators' meaning: those are in the neighbouring modules.
"""

import functools
from importlib.resources import files
from pathlib import Path

import torch

from eprt import env

ISA_NAMES = ("scalar", "avx2", "avx512", "amx")


def library_path() -> Path | None:
    """Where eprt_ops.so lies (an editable install keeps it apart from the sources), or None."""
    import eprt

    for root in eprt.__path__:
        candidate = Path(root) / "lib" / "eprt_ops.so"
        if candidate.exists():
            return candidate
    try:
        candidate = Path(str(files("eprt").joinpath("lib/eprt_ops.so")))
    except (FileNotFoundError, ModuleNotFoundError):
        return None
    return candidate if candidate.exists() else None


@functools.cache
def load():
    """The loaded operator namespace torch.ops.eprt. Raises ImportError with the remedy when it was not built."""
    path = library_path()
    if path is None:
        raise ImportError(
            "eprt's native library is not built; run `make build` (or pip install --no-build-isolation -e .)"
        )
    torch.ops.load_library(str(path))
    isa = env.get("EPRT_CPU_ISA")
    if isa is not None:
        set_isa(isa)
    return torch.ops.eprt


def isa() -> str:
    """The instruction set the CPU kernels use now: scalar, avx2, avx512 or amx."""
    return ISA_NAMES[load().cpu_isa()]


def detected_isa() -> str:
    """The widest instruction set this CPU supports."""
    return ISA_NAMES[load().cpu_isa_detected()]


def set_isa(name: str) -> None:
    """Lowers (or restores) the instruction set; ValueError when this CPU lacks it."""
    level = ISA_NAMES.index(name)
    ops = torch.ops.eprt
    if level > ops.cpu_isa_detected():
        raise ValueError(f"EPRT_CPU_ISA={name}: this CPU has only {ISA_NAMES[ops.cpu_isa_detected()]}")
    ops.set_cpu_isa(level)
