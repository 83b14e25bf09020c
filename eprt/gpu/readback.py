"""Copies between host and GPU that block neither: overwrite() from the host, HostSnapshot and Readback to it.

A HostSnapshot copies once, a Readback again and again. Knows nothing of what the values mean.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copies values, on the host, to the tensor, in the order of the current stream."""
    tensor.copy_(values.pin_memory() if tensor.is_cuda else values, non_blocking=True)


class HostSnapshot:
    """The present values of tensors, in the order of the current stream, copied to the host by one copy.

    tensors: all on one device. Those on the CPU are copied at once.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        on_gpu = tensors[0].is_cuda
        self._kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        flat = torch.cat([_bytes(tensor) for tensor in tensors])
        self._host = flat
        self._copied: torch.cuda.Event | None = None
        if on_gpu:
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def has_arrived(self) -> bool:
        return self._copied is None or self._copied.query()

    def values(self) -> list[np.ndarray]:
        """The values, once they have arrived: waits for them."""
        if self._copied is not None:
            self._copied.synchronize()
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in self._kinds]
        parts = self._host.split([_padded(size) for size in sizes])
        return [
            part[:size].view(dtype).view(shape).numpy() for part, size, (shape, dtype) in zip(parts, sizes, self._kinds)
        ]


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor as uint8, padded so that a tensor of any dtype may follow."""
    flat = tensor.reshape(-1).view(torch.uint8)
    padding = _padded(len(flat)) - len(flat)
    return torch.nn.functional.pad(flat, (0, padding)) if padding else flat


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


class Readback:
    """Counters that kernels keep, read without waiting.

    read() requests their values and returns the latest that have arrived: the present ones if the GPU is idle (or the
    tensors are on the CPU), else those of the previous read() or of an earlier one.

    tensors: the counters, all on one device.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors = list(tensors)
        self._on_gpu = tensors[0].is_cuda
        self._values = [torch.zeros(tensor.shape, dtype=tensor.dtype).numpy() for tensor in tensors]
        self._sent: HostSnapshot | None = None

    def read(self) -> list[np.ndarray]:
        """Arrays of the tensors' shapes, which the caller owns."""
        is_idle = not self._on_gpu or torch.cuda.current_stream(self._tensors[0].device).query()
        if is_idle:
            self._sent = HostSnapshot(self._tensors)
        if self._sent is not None and (is_idle or self._sent.has_arrived):
            self._values, self._sent = self._sent.values(), None
        if self._sent is None and not is_idle:
            self._sent = HostSnapshot(self._tensors)
        return [value.copy() for value in self._values]
