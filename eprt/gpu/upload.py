"""Copies host arrays to GPU tensors without waiting for the GPU: through pinned memory, in stream order.

A plain Tensor.to() from pageable memory waits until everything launched before it has been computed.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; enough for any dtype's view


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays as tensors of the same dtypes and shapes.

    On a GPU they are copied by one copy, and the arrays may be changed when this returns; on the CPU the tensors share
    the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    staging = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    host, starts, at = staging.numpy(), [], 0
    for array, size in zip(arrays, sizes):
        starts.append(at)
        host[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += size
    # torch reuses pinned memory only after copies from it are done.
    on_gpu = staging.to(device, non_blocking=True)
    return [
        on_gpu[start : start + array.nbytes].view(_torch_dtype(array.dtype)).view(array.shape)
        for start, array in zip(starts, arrays)
    ]


def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=dtype)).dtype
