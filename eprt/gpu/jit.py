"""CUDA kernels without a toolchain: NVRTC compiles header-free sources to cubins, kept in a content-addressed cache.

A cubin needs only the driver and runs on exactly its architecture. The cache key is a hash of everything that decides
the binary (source text, included project files, options, NVRTC version), so a cubin is never stale; a cache directory
can be filled on a machine without a GPU (`eprt env --build-kernels`) and copied.
Knows nothing of launching (launch.py) or of what the kernels do.
"""

import functools
import hashlib
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from eprt import env

_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


class KernelCompileError(RuntimeError):
    """NVRTC refused a source; the message carries its log."""


@dataclass(frozen=True)
class KernelSource:
    """One translation unit: a file under csrc/cuda, the architecture, and preprocessor constants.

    name: file stem, e.g. "ll_dispatch". arch: e.g. "sm_90a". defines: constants fixed at compile time.
    """

    name: str
    arch: str = "sm_90a"
    defines: tuple[tuple[str, str | int], ...] = field(default=())

    def options(self) -> list[str]:
        return [
            f"--gpu-architecture={self.arch}",
            "--std=c++17",
            "--extra-device-vectorization",
            "-default-device",
            *(f"-D{key}={value}" for key, value in self.defines),
        ]


def source_dir() -> Path:
    """csrc/cuda beside the package (a source checkout, whose own files count) or inside it (a wheel)."""
    import eprt

    roots = [Path(root) for root in eprt.__path__]
    for candidate in (*(root.parent / "csrc" / "cuda" for root in roots), *(root / "cuda_src" for root in roots)):
        if (candidate / "common.cuh").exists():
            return candidate
    raise FileNotFoundError("eprt's CUDA sources (csrc/cuda) are missing from this installation; reinstall eprt")


@functools.cache
def read_source(name: str) -> str:
    """The file with its project includes spliced in once each, so that a kernel is one self-contained text."""
    seen: set[str] = set()

    def splice(file_name: str) -> str:
        if file_name in seen:
            return ""
        seen.add(file_name)
        text = (source_dir() / file_name).read_text()
        return _INCLUDE.sub(lambda match: splice(match.group(1)), text)

    return splice(f"{name}.cu")


@functools.cache
def _nvrtc():
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ImportError(f"compiling CUDA kernels needs NVRTC: pip install 'eprt[cuda13]' ({error})") from None
    return nvrtc


@functools.cache
def nvrtc_version() -> str:
    error, major, minor = _nvrtc().nvrtcVersion()
    if error != 0:
        raise KernelCompileError(f"nvrtcVersion failed: {error}")
    return f"{major}.{minor}"


def cache_key(source: KernelSource) -> str:
    """Hex digest of all that decides the binary."""
    parts = [read_source(source.name), *source.options(), nvrtc_version()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def cubin(source: KernelSource) -> bytes:
    """The compiled kernel, from the cache when it is there."""
    path = Path(env.get("EPRT_KERNEL_CACHE")).expanduser() / f"{source.name}-{source.arch}-{cache_key(source)}.cubin"
    if path.exists():
        return path.read_bytes()
    binary = compile_source(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Ranks may compile the same kernel at once: write aside, then rename, so that no one reads half a file.
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as aside:
        aside.write(binary)
    os.replace(aside.name, path)
    return binary


def compile_source(source: KernelSource) -> bytes:
    """Runs NVRTC. Raises KernelCompileError with the compiler's log."""
    nvrtc = _nvrtc()
    options = [option.encode() for option in source.options()]
    text, name = read_source(source.name).encode(), f"{source.name}.cu".encode()
    error, program = nvrtc.nvrtcCreateProgram(text, name, 0, [], [])
    if error != 0:
        raise KernelCompileError(f"nvrtcCreateProgram({source.name}) failed: {error}")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != 0:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = b" " * size
            nvrtc.nvrtcGetProgramLog(program, log)
            raise KernelCompileError(f"{source.name}.cu for {source.arch} {dict(source.defines)}:\n{log.decode()}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        binary = b" " * size
        nvrtc.nvrtcGetCUBIN(program, binary)
        return binary
    finally:
        nvrtc.nvrtcDestroyProgram(program)
