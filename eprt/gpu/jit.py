"""CUDA kernels without a toolchain: NVRTC compiles header-free sources to cubins, kept in a content-addressed cache.

A cubin needs only the driver and runs on exactly one architecture. Its name holds everything that determines the binary
(a hash of the source text, the included project files and the options; NVRTC's version), so a cubin is never stale.
Cubins may be compiled on a machine without a GPU (`eprt env --build-kernels`), copied into another machine's cache, or
shipped in an installed package, in the folder `cubins` beside the sources. Without NVRTC, cubins of any NVRTC version
are accepted. Knows nothing of launching (launch.py) or of what the kernels do.
"""

import functools
import hashlib
import os
import re
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from eprt import env

_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


class KernelCompileError(RuntimeError):
    """NVRTC refused a source; the message holds its log."""


@dataclass(frozen=True)
class KernelSource:
    """One translation unit: all that decides its binary, but for NVRTC's version."""

    name: str  # stem of a file in csrc/cuda, e.g. "low_latency_dispatch"
    arch: str = "sm_90a"
    defines: tuple[tuple[str, str | int], ...] = ()  # preprocessor constants
    extra: tuple[str, ...] = ()  # more options of NVRTC

    def options(self) -> list[str]:
        return [
            f"--gpu-architecture={self.arch}",
            "--std=c++17",
            "--extra-device-vectorization",
            "-default-device",
            *(f"-D{key}={value}" for key, value in self.defines),
            *self.extra,
        ]


def source_dir() -> Path:
    """csrc/cuda beside the package (in a source checkout) or inside it (in a wheel)."""
    import eprt

    roots = [Path(root) for root in eprt.__path__]
    for candidate in (*(root.parent / "csrc" / "cuda" for root in roots), *(root / "cuda_src" for root in roots)):
        if (candidate / "common.cuh").exists():
            return candidate
    raise FileNotFoundError("eprt's CUDA sources (csrc/cuda) are missing from this installation; reinstall eprt")


@functools.cache
def read_source(name: str) -> str:
    """The file with each project include spliced in once: NVRTC gets one self-contained text."""
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
    """File name of the compiled source. version: NVRTC's, or a glob pattern."""
    return cached_name(f"{source.name}-{source.arch}", [read_source(source.name), *source.options()], version)


def cached_name(stem: str, contents: list[str], version: str) -> str:
    """Of a binary that all these decide. version: NVRTC's, or a glob pattern."""
    digest = hashlib.sha256("\0".join(contents).encode()).hexdigest()[:32]
    return f"{stem}-{digest}-nvrtc{version}.cubin"


def cache_dir() -> Path:
    return Path(env.get("EPRT_KERNEL_CACHE")).expanduser()


def find_cached(name: str) -> bytes | None:
    """The cubin from the cache or the package, if one lies there undamaged. name: of its file, or a glob pattern."""
    for folder in (cache_dir(), source_dir() / "cubins"):
        for path in sorted(folder.glob(name), reverse=True):
            if _is_whole(binary := path.read_bytes()):
                return binary
    return None


def _is_whole(binary: bytes) -> bool:
    """False for what a host that crashed while writing, or an interrupted copy, leaves behind: an empty file, zeros, or
    a file without its end, where NVRTC puts the program headers (ELF64)."""
    if len(binary) < 64 or not binary.startswith(b"\x7fELF"):
        return False
    (begin,), (size, count) = struct.unpack_from("<Q", binary, 32), struct.unpack_from("<HH", binary, 54)
    return begin + size * count <= len(binary)


def cubin(source: KernelSource) -> bytes:
    """The compiled kernel, compiled now if necessary. ImportError when that needs NVRTC and NVRTC is missing."""
    try:
        version = nvrtc_version()
    except ImportError as error:
        if binary := find_cached(cubin_name(source, "*")):
            return binary
        raise ImportError(
            f"{cubin_name(source, '*')} is neither in {cache_dir()} nor in {source_dir() / 'cubins'}, or is broken "
            f"there; {error}; or fill EPRT_KERNEL_CACHE on a machine that has NVRTC (eprt env --build-kernels)"
        ) from None
    if binary := find_cached(cubin_name(source, version)):
        return binary
    return keep(compile_source(source), cubin_name(source, version))


def keep(binary: bytes, name: str) -> bytes:
    """The binary, which from now on lies in the cache."""
    try:
        _write_file(binary, cache_dir(), name)
    except OSError as error:
        raise OSError(
            f"compiled CUDA kernels cannot be kept in {cache_dir()}: {error.strerror}; let EPRT_KERNEL_CACHE name a "
            "folder that can be written"
        ) from None
    return binary


def _write_file(binary: bytes, folder: Path, name: str) -> None:
    """Writes a temporary file, then renames it: ranks may compile a kernel at once, and none reads half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as aside:
        try:
            aside.write(binary)
            aside.flush()
        except OSError:  # e.g. the disk is full
            os.unlink(aside.name)
            raise
    os.chmod(aside.name, 0o644)  # temporary files are private; a cache may be filled by one user for others
    os.replace(aside.name, folder / name)


def compile_source(source: KernelSource) -> bytes:
    """The cubin, from NVRTC. KernelCompileError holds the compiler's log."""
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
