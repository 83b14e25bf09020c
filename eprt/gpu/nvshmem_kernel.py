"""NvshmemKernel: a kernel that calls NVSHMEM on the GPU: compiled by NVRTC, linked to NVSHMEM's device library.

Kernels declare the calls of csrc/cuda/wire.cuh; wire_nvshmem.cu has them, and alone needs NVSHMEM's headers and CUDA's.
A linked cubin belongs to one release of NVSHMEM, whose name and library decide its name in the cache.
"""

import functools
import hashlib
import importlib.util
from dataclasses import replace
from pathlib import Path

from eprt import env
from eprt.gpu import jit
from eprt.gpu.jit import KernelCompileError, KernelSource
from eprt.gpu.launch import Kernel
from eprt.gpu.nvshmem import Nvshmem, NvshmemFiles, nvshmem_files

_RELOCATABLE = "-rdc=true"
# A kernel of 640 threads a block has 102 registers for each; what it calls has as many at most.
_FEW_REGISTERS = "--maxrregcount=96"
# Where toolkits and wheels have CUDA's headers, below a folder: the headers, then those of CCCL.
_HEADERS = (("include", "include/cccl"), ("cuda_runtime/include", "cuda_cccl/include"))


class NvshmemKernel(Kernel):
    """As Kernel. nvshmem: the process has joined it."""

    def __init__(self, nvshmem: Nvshmem, source: KernelSource, entry: str, num_threads: int, shared_bytes: int = 0):
        super().__init__(source, entry, num_threads, shared_bytes, binary=linked_cubin(source, nvshmem_files()))
        self._nvshmem = nvshmem
        nvshmem.attach(self._library)

    def close(self) -> None:
        if self._library is not None:
            self._nvshmem.detach(self._library)
        super().close()


def linked_cubin(source: KernelSource, files: NvshmemFiles) -> bytes:
    """The kernel with all that it calls, compiled and linked now if necessary.

    ImportError, with the remedy, when that needs something that is not installed.
    """
    wire = KernelSource("wire_nvshmem", source.arch)
    contents = [jit.read_source(source.name), *source.options(), jit.read_source(wire.name)]
    stem = f"{source.name}-nvshmem{files.release}-{source.arch}"
    contents += [files.release, _digest(files.device_library)]
    name = jit.cached_name(stem, contents, jit.nvrtc_version())
    if binary := jit.find_cached(name):
        return binary
    includes = tuple(f"-I{folder}" for folder in (files.include, *cuda_headers()))
    wire = replace(wire, defines=(("NVSHMEM_RELEASE", files.release),), extra=(_RELOCATABLE, _FEW_REGISTERS, *includes))
    objects = [jit.compile_source(replace(source, extra=(*source.extra, _RELOCATABLE))), jit.cubin(wire)]
    return jit.keep(_link(source, objects, files.device_library), name)


@functools.cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def cuda_headers() -> tuple[Path, ...]:
    """Folders of CUDA's headers and CCCL's, of a toolkit or of wheels. ImportError where there are none."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(root) for root in (spec.submodule_search_locations or () if spec else ())]
    for root in (env.cuda_home(), *(wheel / major for wheel in wheels for major in ("cu13", ""))):
        for cuda, cccl in _HEADERS:
            if (root / cuda / "cuda_fp16.h").exists() and (root / cccl / "cuda/std/tuple").exists():
                return root / cuda, root / cccl
    raise ImportError(
        "compiling for NVSHMEM needs CUDA's headers, which neither CUDA_HOME nor /usr/local/cuda has: "
        "pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl"
    )


def _link(source: KernelSource, objects: list[bytes], library: Path) -> bytes:
    try:
        from cuda.bindings import nvjitlink

        linker = nvjitlink.create(1, [f"-arch={source.arch}"])
    except (ImportError, RuntimeError) as error:
        raise ImportError(f"linking to NVSHMEM needs nvJitLink: pip install nvidia-nvjitlink ({error})") from None
    try:
        for number, binary in enumerate(objects):
            nvjitlink.add_data(linker, nvjitlink.InputType.CUBIN, binary, len(binary), f"{source.name}{number}")
        nvjitlink.add_file(linker, nvjitlink.InputType.LIBRARY, str(library))
        nvjitlink.complete(linker)
        linked = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, linked)
        return bytes(linked)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(linker))
        nvjitlink.get_error_log(linker, log)
        raise KernelCompileError(
            f"linking {source.name} to {library}: {error}\n{log.decode(errors='replace')}"
        ) from None
    finally:
        nvjitlink.destroy(linker)
