"""CUDA kernels without a toolchain: NVRTC compiles header-free sources to cubins, kept in a content-addressed cache.

A cubin needs only the driver and runs on exactly its architecture. Its name carries all that decides the binary (a hash
of source text, included project files and options; NVRTC's version), so a cubin is never stale. They may be compiled on
a machine without a GPU (`eprt env --build-kernels`), copied into another's cache, or lie in an installed package, in
the folder `cubins` beside the sources; without NVRTC any version's will do.
Knows nothing of launching (launch.py) or of what the kernels do.
"""

import functools
import hashlib
import os
import re
import struct
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

    name: file stem, e.g. "low_latency_dispatch". arch: e.g. "sm_90a". defines: constants fixed at compile time.
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

        nvrtc.nvrtcVersion()  # finds the library itself
    except (ImportError, RuntimeError) as error:
        raise ImportError(f"compiling CUDA kernels needs NVRTC: pip install 'eprt[cuda13]' ({error})") from None
    return nvrtc


@functools.cache
def nvrtc_version() -> str:
    error, major, minor = _nvrtc().nvrtcVersion()
    if error != 0:
        raise KernelCompileError(f"nvrtcVersion failed: {error}")
    return f"{major}.{minor}"


def cubin_name(source: KernelSource, version: str) -> str:
    """Of the file. version: of NVRTC, or a pattern."""
    decides = "\0".join([read_source(source.name), *source.options()])
    return f"{source.name}-{source.arch}-{hashlib.sha256(decides.encode()).hexdigest()[:32]}-nvrtc{version}.cubin"


def cache_dir() -> Path:
    return Path(env.get("EPRT_KERNEL_CACHE")).expanduser()


def _built_ahead(source: KernelSource, version: str) -> bytes | None:
    for folder in (cache_dir(), source_dir() / "cubins"):
        for path in sorted(folder.glob(cubin_name(source, version)), reverse=True):
            if _is_whole(binary := path.read_bytes()):
                return binary
    return None


def _is_whole(binary: bytes) -> bool:
    """Not so is what a host leaves that went down while it wrote, or a copy that was broken off: empty, zeros, or
    without its end, where NVRTC puts the program headers (ELF64)."""
    if len(binary) < 64 or not binary.startswith(b"\x7fELF"):
        return False
    (begin,), (size, count) = struct.unpack_from("<Q", binary, 32), struct.unpack_from("<HH", binary, 54)
    return begin + size * count <= len(binary)


def cubin(source: KernelSource) -> bytes:
    """The compiled kernel; compiled now unless it is there. Raises ImportError when that would need a missing NVRTC."""
    try:
        version = nvrtc_version()
    except ImportError as error:
        if binary := _built_ahead(source, "*"):
            return binary
        raise ImportError(
            f"{cubin_name(source, '*')} is neither in {cache_dir()} nor in {source_dir() / 'cubins'}, or is broken "
            f"there; {error}; or fill "
            "EPRT_KERNEL_CACHE on a machine that has NVRTC (eprt env --build-kernels)"
        ) from None
    if binary := _built_ahead(source, version):
        return binary
    binary = compile_source(source)
    try:
        _keep(binary, cache_dir(), cubin_name(source, version))
    except OSError as error:
        raise OSError(
            f"compiled CUDA kernels cannot be kept in {cache_dir()}: {error.strerror}; let EPRT_KERNEL_CACHE name a "
            "folder that can be written"
        ) from None
    return binary


def _keep(binary: bytes, folder: Path, name: str) -> None:
    """Ranks may compile the same kernel at once: write aside, then rename, so that no one reads half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as aside:
        try:
            aside.write(binary)
            aside.flush()
        except OSError:  # the disk is full
            os.unlink(aside.name)
            raise
    os.chmod(aside.name, 0o644)  # temporary files are their maker's alone; a cache may be filled by another user
    os.replace(aside.name, folder / name)


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
