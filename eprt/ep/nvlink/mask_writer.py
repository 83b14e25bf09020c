"""MaskWriter: writes the mask of ranks that kernels do not wait for, also while a kernel waits for one of them."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor


class MaskWriter:
    """On a stream of its own, past whatever waits on others. From any thread; returns when the mask is written.

    mask: int32 [R] on the GPU, 1 for masked ranks; 0 for all of them yet.
    """

    def __init__(self, mask: Tensor):
        self._mask, self._stream = mask, torch.cuda.Stream(priority=-1)
        self._values = torch.zeros(len(mask), dtype=mask.dtype, pin_memory=True)
        self._is_writing = threading.Lock()
        # What CUDA sets up for the first copy of a process is set up now, and not while a kernel waits.
        self.write([False] * len(mask))

    def write(self, masked: Sequence[bool], first: int = 0) -> None:
        """masked: of the ranks from `first` on."""
        some = slice(first, first + len(masked))
        with self._is_writing, torch.inference_mode(), torch.cuda.stream(self._stream):
            self._values[some] = torch.tensor(masked)
            self._mask[some].copy_(self._values[some], non_blocking=True)
            self._stream.synchronize()
