"""Between host and GPU without holding up either: overwrite() from the host; Snapshot to it once, Readback again and
again."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """values, on the host, become the tensor's, in the order of the current stream."""
    tensor.copy_(values.pin_memory() if tensor.is_cuda else values, non_blocking=True)


class Snapshot:
    """Values of tensors, as of now in the order of the current stream, on their way to the host in one copy. Of tensors
    on the CPU: a copy."""

    def __init__(self, tensors: Sequence[Tensor]):
        on_gpu = tensors[0].is_cuda
        self._kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        flat = torch.cat([_bytes(tensor) for tensor in tensors])
        self._host = flat
        if on_gpu:
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
        self._come = torch.cuda.Event() if on_gpu else None
        if self._come is not None:
            self._come.record()

    @property
    def has_come(self) -> bool:
        return self._come is None or self._come.query()

    def values(self) -> list[np.ndarray]:
        """Waits for them."""
        if self._come is not None:
            self._come.synchronize()
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in self._kinds]
        parts = self._host.split([_padded(size) for size in sizes])
        return [
            part[:size].view(dtype).view(shape).numpy() for part, size, (shape, dtype) in zip(parts, sizes, self._kinds)
        ]


def _bytes(tensor: Tensor) -> Tensor:
    """uint8, padded so that any dtype may follow."""
    flat = tensor.reshape(-1).view(torch.uint8)
    padding = _padded(len(flat)) - len(flat)
    return torch.nn.functional.pad(flat, (0, padding)) if padding else flat


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


class Readback:
    """Counters that kernels keep. read() sends for their values and returns the latest that have come: of a GPU with
    nothing to do, as of now; of a busy one, as of the read() before, or of one still earlier. On the CPU, as of now."""

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors = list(tensors)
        self._on_gpu = tensors[0].is_cuda
        self._values = [torch.zeros(tensor.shape, dtype=tensor.dtype).numpy() for tensor in tensors]
        self._sent: Snapshot | None = None

    def read(self) -> list[np.ndarray]:
        """Arrays of the tensors' shapes, the caller's own."""
        is_idle = not self._on_gpu or torch.cuda.current_stream(self._tensors[0].device).query()
        if is_idle:
            self._sent = Snapshot(self._tensors)
        if self._sent is not None and (is_idle or self._sent.has_come):
            self._values, self._sent = self._sent.values(), None
        if self._sent is None and not is_idle:
            self._sent = Snapshot(self._tensors)
        return [value.copy() for value in self._values]
