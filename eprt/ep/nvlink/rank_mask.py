"""RankMask: the ranks that the kernels of this rank do not wait for, written also while a kernel waits for one of them.

It exists twice. Every kernel reads `on_gpu`, in the GPU's memory, and sets it at its deadline. What the host decides it
also writes into words in its own memory, which a wait that has lasted for a millisecond reads (csrc/cuda/common.cuh). A
copy to the GPU runs when CUDA lets it, and another thread may be in a call of CUDA's that lasts until the GPU is idle,
as loading a kernel's code may. To store a word takes nothing of CUDA's.
"""

import threading
from collections.abc import Sequence

import torch

from eprt.gpu.symmetric import HostWords


class RankMask:
    """Of num_ranks ranks, none of them masked yet. Needs close()."""

    def __init__(self, num_ranks: int):
        self.on_gpu = torch.zeros(num_ranks, dtype=torch.int32, device="cuda")  # 1 for masked ranks
        self.told = HostWords(num_ranks)  # the same, as far as the host decided it
        self._stream = torch.cuda.Stream(priority=-1)  # past whatever waits on others
        self._values = torch.zeros(num_ranks, dtype=torch.int32, pin_memory=True)
        self._is_writing = threading.Lock()
        # What CUDA sets up for the first copy of a process is set up now, and not while a kernel waits.
        self.write([False] * num_ranks)

    def write(self, masked: Sequence[bool], first: int = 0) -> None:
        """At once for kernels that wait; returns when those that have not begun see it, too. From any thread.

        masked: of the ranks from `first` on.
        """
        with self._is_writing:
            for rank, value in enumerate(masked, first):
                self.told.words[rank] = value
            self._copy(masked, slice(first, first + len(masked)))

    def _copy(self, masked: Sequence[bool], some: slice) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._values[some] = torch.tensor(masked)
            self.on_gpu[some].copy_(self._values[some], non_blocking=True)
            self._stream.synchronize()

    def take_back(self, rank: int | None = None) -> None:
        """In the order of the current stream: waits for this rank again, or for all."""
        some = slice(None) if rank is None else slice(rank, rank + 1)
        for each in range(len(self.told.words))[some]:
            self.told.words[each] = 0
        self.on_gpu[some] = 0

    def close(self) -> None:
        """When no kernel runs."""
        self.told.close()
