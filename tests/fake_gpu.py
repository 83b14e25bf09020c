"""A GPU that computes nothing, for what the host does: which kernels it launches, with which parameters, and what torch
is asked for meanwhile. Tensors are the CPU's. (tests/emulated runs kernels.)"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eprt.compat.deep_ep import dispatch_layout
from eprt.ep.group.view import View
from eprt.ep.nvlink import kernel_state, low_latency, normal, rank_mask
from eprt.gpu import symmetric
from tests.emulated import device
from tests.emulated.device import Event, HostWords, Stream
from tests.gather_group import GatherGroup


class Ops(TorchDispatchMode):
    """Counts torch's operations, those that make a tensor of memory apart."""

    def __init__(self):
        super().__init__()
        self.names: Counter[str] = Counter()
        self.allocations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.names[name] += 1
        if name.startswith(("empty", "zeros", "clone", "ones")) and result.numel():
            self.allocations += 1
        return result


class Group(GatherGroup):
    """One of several ranks, which all look like this one."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.node_of_rank, self.view = rank, size, (0,) * size, View.full(size)

    def allgather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def barrier(self) -> None: ...

    def lost_ranks(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None: ...


class Kernel:
    def __init__(self, source: Any, entry: str, num_threads: int, shared_bytes: int = 0):
        self.name, self.num_threads = entry.split("::")[-1], num_threads

    def close(self) -> None: ...


class SymmetricMemory(symmetric.SymmetricMemory):
    def __init__(self, group: Group, num_bytes: int, by_nvlink: bool = False):
        self.num_bytes, self._device = num_bytes, torch.device("cpu")
        self._bytes = torch.empty(num_bytes + 128, dtype=torch.uint8)
        self._own = -(-self._bytes.data_ptr() // 128) * 128
        self.peer_ptr = [self._own] * group.size

    def close(self) -> None: ...


class FakeGpu:
    """launched: (kernel, a copy of its parameters, thread blocks), since clear(). on_launch: called at each, with the
    kernel's name and its parameters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.launched: list[tuple[str, Any, int]] = []
        self.on_launch: Callable[[str, Any], None] = lambda name, params: None
        fake = self

        class Launch(device.Launch):
            def __call__(self, num_blocks: int, stream: int) -> None:
                copy = type(self.params).from_buffer_copy(self.params)
                fake.launched.append((self.kernel.name, copy, num_blocks))
                fake.on_launch(self.kernel.name, copy)

        for module in (kernel_state, low_latency, normal, rank_mask, dispatch_layout):
            for value in (Kernel, Launch, SymmetricMemory, HostWords):
                monkeypatch.setattr(module, value.__name__, value, raising=False)
            monkeypatch.setattr(module, "this_arch", lambda: "sm_90a", raising=False)
        monkeypatch.setattr(normal, "most_shared_bytes", lambda device: 227 << 10)
        for name, value in {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "synchronize": lambda: None,
            "get_device_properties": lambda *args: SimpleNamespace(multi_processor_count=132),
            "Stream": Stream,
            "Event": Event,
            "current_stream": Stream,
            "stream": nullcontext,
            "is_current_stream_capturing": lambda: False,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name in ("_cuda_getCurrentRawStream", "_cuda_isCurrentStreamCapturing"):
            monkeypatch.setattr(torch._C, name, lambda *args: 0, raising=False)
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
        self.other_gpus: set[int] = set()  # the addresses of tensors that are not this GPU's
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: int(tensor.data_ptr() in self.other_gpus))
        for name in ("empty", "zeros"):
            monkeypatch.setattr(torch, name, _on_cpu(getattr(torch, name)))

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.launched]

    def clear(self) -> None:
        self.launched.clear()


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return make(*args, **{name: value for name, value in kwargs.items() if name != "pin_memory"})

    return made
