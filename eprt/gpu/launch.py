"""Kernel: a compiled entry point. Launch: a prepared call of a kernel.

A call of a Launch is one driver call on structs laid out before; benchmarks/ep/bench_ep.py measures what it costs the
host. Knows nothing of what the kernels do.
"""

import ctypes
import functools
from typing import Any

from eprt.gpu.driver import CudaError, api, check
from eprt.gpu.jit import KernelSource, cubin


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("blocks", "blocks_y", "blocks_z", "threads", "threads_y", "threads_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, its value as integers."""

    _fields_ = (("id", ctypes.c_uint32), ("_", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_STARTS_EARLY = _Attribute(6, 0, (ctypes.c_uint32 * 16)(1))


@functools.cache
def _launch_kernel():
    """cuLaunchKernelEx through ctypes: it is called on every step, and cuda-bindings' argument handling costs time.
    ctypes needs half as long for its four arguments as for the eleven of cuLaunchKernel."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = [ctypes.c_void_p] * 4
    function.restype = ctypes.c_int
    return function


class Kernel:
    """A compiled kernel, loaded into the current context.

    source: what to compile.
    entry: the kernel's qualified C++ name ("eprt::low_latency::dispatch"), or its extern "C" name.
    num_threads: per block.
    shared_bytes: dynamic shared memory per block.
    binary: what the source was made into, if not by jit.cubin.
    """

    def __init__(
        self, source: KernelSource, entry: str, num_threads: int, shared_bytes: int = 0, binary: bytes | None = None
    ):
        cu = api()
        self.name, self.num_threads, self.shared_bytes = entry, num_threads, shared_bytes
        self._binary = cubin(source) if binary is None else binary  # the driver may read it again
        library = check(cu.cuLibraryLoadData(self._binary, [], [], 0, [], [], 0), f"loading {source.name}")
        kernel = check(cu.cuLibraryGetKernel(library, _symbol(library, entry)), f"finding {entry} in {source.name}")
        self._library, function = library, check(cu.cuKernelGetFunction(kernel), f"preparing {entry}")
        if shared_bytes > 48 * 1024:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            what = f"{entry} asks for {shared_bytes} B of shared memory per block; use fewer tokens or experts per call"
            check(cu.cuFuncSetAttribute(function, attribute, shared_bytes), what)
        self.handle = int(function)

    def close(self) -> None:
        if self._library is not None:
            check(api().cuLibraryUnload(self._library), f"unloading {self.name}")
            self._library = None


def most_shared_bytes(device: int) -> int:
    """Dynamic shared memory that a thread block can have: 227 KB on sm_90, 163 KB on sm_80, 99 KB on sm_86."""
    cu = api()
    attribute = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    what = "asking for the size of shared memory"
    return check(cu.cuDeviceGetAttribute(attribute, check(cu.cuDeviceGet(device), what)), what)


def _symbol(library: Any, entry: str) -> bytes:
    """The kernel's name in the cubin. A qualified name is mangled, followed by the parameter types."""
    if "::" not in entry:
        return entry.encode()
    mangled = "_ZN" + "".join(f"{len(part)}{part}" for part in entry.split("::")) + "E"
    cu = api()
    count = check(cu.cuLibraryGetKernelCount(library), "counting kernels")
    kernels = check(cu.cuLibraryEnumerateKernels(count, library), "listing kernels")
    names = [check(cu.cuKernelGetName(kernel), "naming a kernel") for kernel in kernels]
    for name in names:
        if name.startswith(mangled.encode()):
            return name
    raise CudaError(f"no kernel {entry} among {names}")


class Launch:
    """A prepared call of a kernel. use() exchanges the kernel for another one with the same parameter struct.

    kernel: the kernel to begin with.
    params: the kernel's one argument, a ctypes struct. Change its fields, then call; a call copies it.
    starts_early: blocks may start while the last blocks of the preceding kernel still run; the kernel must itself wait
        for the end of the preceding one (griddepcontrol.wait) before it reads what that one wrote.
    """

    __slots__ = ("_arguments", "_arguments_at", "_config", "_config_at", "_function", "_launch", "kernel", "params")

    def __init__(self, kernel: Kernel, params: ctypes.Structure, starts_early: bool = False):
        self.params = params
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._config = _Config(blocks_y=1, blocks_z=1, threads_y=1, threads_z=1)
        if starts_early:
            self._config.attributes, self._config.num_attributes = ctypes.addressof(_STARTS_EARLY), 1
        self._config_at, self._arguments_at = ctypes.addressof(self._config), ctypes.addressof(self._arguments)
        self._launch = _launch_kernel()
        self.use(kernel)

    def use(self, kernel: Kernel) -> None:
        self.kernel, self._function = kernel, kernel.handle
        self._config.threads, self._config.shared_bytes = kernel.num_threads, kernel.shared_bytes

    def __call__(self, num_blocks: int, stream: int) -> None:
        """Launches the kernel. stream: a raw cudaStream_t as an int."""
        config = self._config
        config.blocks, config.stream = num_blocks, stream
        status = self._launch(self._config_at, self._function, self._arguments_at, None)
        if status:
            kernel = self.kernel
            _, text = api().cuGetErrorString(api().CUresult(status))
            raise CudaError(f"launching {kernel.name} on {num_blocks} blocks: {text.decode() if text else status}")
