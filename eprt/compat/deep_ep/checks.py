"""Checks of what callers pass to the DeepEP face. Every error names the argument, the rank and what was expected."""

from typing import NoReturn

import torch
from torch import Tensor

from eprt.ep.nvlink_low_latency import Signal

MAX_SMS = 64  # of a low-latency call
INDEX_DTYPES = (torch.int64, torch.int32)


class Checks:
    """Of one rank's Buffer."""

    def __init__(self, rank: int, num_ranks: int):
        self._where, self._num_ranks = f"[rank {rank}/{num_ranks}]", num_ranks

    def tensor(self, call: str, name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], *shape: int | None) -> None:
        """A contiguous tensor on the GPU. shape: None where any length will do."""
        got = value.shape
        fits = value.dtype in dtypes and len(got) == len(shape)
        if fits:  # a loop: this runs several times in every call
            for want, length in zip(shape, got):
                fits = fits and (want is None or want == length)
        if not fits:
            want = ", ".join("any" if length is None else str(length) for length in shape)
            names = " or ".join(map(str, dtypes))
            self.fail(f"{call}: {name} is {value.dtype} {tuple(value.shape)}, expected {names} ({want})")
        if not value.is_cuda:
            self.fail(f"{call}: {name} is on {value.device}; pass a tensor of this rank's GPU")
        if not value.is_contiguous():
            self.fail(f"{call}: {name} is not contiguous")

    def experts(self, call: str, num_experts: int) -> None:
        if num_experts < 1 or num_experts % self._num_ranks:
            self.fail(f"{call}: num_experts={num_experts} is no positive multiple of the {self._num_ranks} ranks")

    def async_or_hook(self, call: str, async_finish: bool, return_recv_hook: bool) -> None:
        if async_finish and return_recv_hook:
            self.fail(f"{call}: async_finish and return_recv_hook exclude each other; a hook is called when it suits")

    def signal(
        self, call: str, counter: Tensor | None, num_local: int, rows_per_expert: int, block_m: int, threshold: int,
        num_sms: int,
    ) -> Signal:  # fmt: skip
        """Single-batch overlap, as combine_send wants it."""
        if counter is None or block_m < 1 or threshold < 1:
            self.fail(
                f"{call}: overlap=True needs comp_signal, block_m >= 1 and threshold >= 1; they are "
                f"{'None' if counter is None else tuple(counter.shape)}, {block_m}, {threshold}"
            )
        tiles = -(-rows_per_expert // block_m)
        self.tensor(call, "comp_signal", counter, (torch.int32, torch.uint32), num_local * tiles)
        if not 1 <= num_sms <= MAX_SMS:
            self.fail(f"{call}: num_sms={num_sms}: must be in 1..{MAX_SMS}")
        return Signal(counter, threshold, block_m, tiles, num_sms)

    def own_stream(self, call: str, has_event: bool, async_finish: bool, allocate_on_comm_stream: bool) -> None:
        if allocate_on_comm_stream and not (has_event and async_finish):
            self.fail(f"{call}: allocate_on_comm_stream=True needs previous_event and async_finish=True")

    def fail(self, message: str) -> NoReturn:
        raise ValueError(f"{self._where} {message}")
