"""A GPU that is not there: eprt's GPU code on CPU tensors, its kernels emulated (kernels.py), ranks as threads.

emulated_ranks(4, case) calls case(group) on four threads, each with torch's "cuda" meaning the CPU. What is emulated is
launching, symmetric memory and the few CUDA calls of torch that the exchange makes; no streams, no graphs.
"""

import ctypes
import gc
import itertools
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from eprt.compat.deep_ep import dispatch_layout
from eprt.ep.group.view import View
from eprt.ep.nvlink import kernel_state, low_latency, meeting, normal, nvshmem_backend, rank_mask
from eprt.gpu import symmetric
from eprt.gpu.jit import KernelSource
from tests.emulated.kernels import library, wire
from tests.gather_group import GatherGroup

_numbers = itertools.count()  # of wires


class CudaIsHere(TorchFunctionMode):
    """The CPU's tensors, taken for a GPU's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return True
        if func is torch.Tensor.get_device:
            return 0
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


class Kernel:
    def __init__(self, source: KernelSource, entry: str, num_threads: int, shared_bytes: int = 0):
        self.name, self.num_threads, self.shared_bytes = entry, num_threads, shared_bytes
        self.launch = library(source, entry).launch

    def close(self) -> None:
        pass


class Launch:
    """Returns when the kernel is done: ranks are threads, and the call lets go of Python's lock."""

    def __init__(self, kernel: Kernel, params: ctypes.Structure):
        self.kernel, self.params = kernel, params

    def use(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __call__(self, num_blocks: int, stream: int) -> None:
        kernel = self.kernel
        kernel.launch(ctypes.addressof(self.params), num_blocks, kernel.num_threads, kernel.shared_bytes)


class Stream:
    """There is one, and a call is done when it returns."""

    cuda_stream = 0

    def __init__(self, priority: int = 0): ...

    def synchronize(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


class Event:
    def record(self, stream: Any = None) -> None: ...


class CpuGenerator(torch.Generator):
    def __new__(cls, device: object = None):
        return super().__new__(cls, "cpu")  # type: ignore


class ThreadGroup(GatherGroup):
    """Among threads."""

    def __init__(self, rank: int, size: int, shared: SimpleNamespace, ranks_per_node: int | None = None):
        self.rank, self.size, self.num_ranks_on_host, self._shared = rank, size, size, shared
        self.node_of_rank = tuple(each // (ranks_per_node or size) for each in range(size))
        self.view = View.full(size)

    def allgather(self, value: Any) -> list[Any]:
        shared = self._shared
        shared.values[self.rank] = value
        shared.barrier.wait()
        values = list(shared.values)
        shared.barrier.wait()
        return values

    def barrier(self) -> None:
        self._shared.barrier.wait()

    def lost_ranks(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None: ...


class SymmetricMemory(symmetric.SymmetricMemory):
    def __init__(self, group: ThreadGroup, num_bytes: int, by_nvlink: bool = False):
        self.group, self.num_bytes, self._device = group, num_bytes, torch.device("cpu")
        self._bytes = torch.zeros(num_bytes + 128, dtype=torch.uint8, device="cpu")
        self._own = -(-self._bytes.data_ptr() // 128) * 128
        self.peer_ptr = group.allgather(self._own)

    def close(self) -> None:
        self.group.barrier()


class WiredMemory(SymmetricMemory):
    """NvshmemMemory: the other nodes' copies are reached by the wire alone."""

    def __init__(self, group: ThreadGroup, num_bytes: int, one_host: bool):
        super().__init__(group, num_bytes)
        nodes = group.node_of_rank
        self.peer_ptr = [at if nodes[rank] == group.node else 0 for rank, at in enumerate(self.peer_ptr)]
        self.nvshmem = object()
        self._number = group.allgather(next(_numbers))[0]
        wire().wire_open(self._number, group.rank, self._own, num_bytes)
        group.barrier()

    def close(self) -> None:
        super().close()
        wire().wire_close(self._number)
        self.group.barrier()


def wired_kernel(nvshmem: Any, *args: Any) -> Kernel:
    return Kernel(*args)


class HostWords:
    def __init__(self, count: int):
        self.words = (ctypes.c_uint32 * count)()
        self.device_ptr = ctypes.addressof(self.words)

    def close(self) -> None:
        pass


def _as_they_were() -> Callable[[], None]:
    """Puts back what cases switch on for the whole process."""
    deterministic, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic

    def put_back(filled: bool = fill.fill_uninitialized_memory) -> None:
        torch.use_deterministic_algorithms(deterministic)
        fill.fill_uninitialized_memory = filled

    return put_back


def _patches(multiprocessors: int) -> ExitStack:
    stack, nothing = ExitStack(), lambda *args, **kwargs: None
    for value in (Kernel, Launch, SymmetricMemory, HostWords):
        for module in (kernel_state, low_latency, meeting, normal, rank_mask, dispatch_layout):
            if hasattr(module, value.__name__):
                stack.enter_context(patch.object(module, value.__name__, value))
    stack.enter_context(patch.object(nvshmem_backend, "NvshmemMemory", WiredMemory))
    stack.enter_context(patch.object(nvshmem_backend, "NvshmemKernel", wired_kernel))
    stack.enter_context(patch.dict(os.environ))
    stack.callback(_as_they_were())
    stack.enter_context(patch.object(normal, "most_shared_bytes", lambda device: 99 << 10))
    properties = SimpleNamespace(multi_processor_count=multiprocessors)
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "synchronize": nothing,
        "get_device_capability": lambda *args: (9, 0),
        "get_device_properties": lambda *args: properties,
        "Stream": Stream,
        "Event": Event,
        "current_stream": Stream,
        "stream": nullcontext,
        "is_current_stream_capturing": lambda: False,
    }.items():
        stack.enter_context(patch.object(torch.cuda, name, value))
    # The last: else eprt.compat.deep_ep would switch CudaIsHere off.
    for name in ("_cuda_getCurrentRawStream", "_cuda_isCurrentStreamCapturing", "_is_torch_function_mode_enabled"):
        stack.enter_context(patch.object(torch._C, name, lambda *args: 0, create=True))
    stack.enter_context(patch.object(torch, "Generator", CpuGenerator))
    stack.enter_context(patch.object(torch.Tensor, "record_stream", nothing))
    return stack


def emulated_ranks(num_ranks: int, case: Callable[..., None], ranks_per_node: int | None = None, **kwargs: Any) -> None:
    """Raises what the first rank to fail raised. GPUs have three multiprocessors, or as many as the case asks for."""
    shared = SimpleNamespace(values=[None] * num_ranks, barrier=threading.Barrier(num_ranks, timeout=120))
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with CudaIsHere():
                case(ThreadGroup(rank, num_ranks, shared, ranks_per_node), **kwargs)
        except BaseException as error:
            errors.append(error)
            shared.barrier.abort()

    with _patches(max(3, kwargs.get("num_sms", 0))):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()  # what looks at streams when it goes
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
