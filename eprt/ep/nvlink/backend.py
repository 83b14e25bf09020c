"""NvlinkBackend: the EP calls between the GPUs of one NVLink domain, one process per GPU, as far as both modes agree.

This file checks, orders and reports. low_latency_backend.py and normal_backend.py say where rows lie; the kernels
(low_latency.py, normal.py, csrc/cuda) move the bytes. docs/protocol.md explains flags, epochs and buffers.
"""

import threading
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eprt.ep.api import DispatchHandle, Received
from eprt.ep.checked_backend import CheckedBackend
from eprt.ep.config import EPConfig
from eprt.ep.errors import CONFIGURED_DEADLINE, EPError
from eprt.ep.group.current_wait import CurrentWait
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.failure import CallContext, take_failure
from eprt.ep.nvlink.options import NvlinkOptions
from eprt.ep.nvlink.structs import RECV, SEND
from eprt.ep.nvlink.waiting import KernelWait
from eprt.ep.order import CALLS, COMBINE_RECV, COMBINE_SEND, DISPATCH_RECV, DISPATCH_SEND
from eprt.ep.stats import EPStats
from eprt.gpu.readback import Readback


@dataclass(slots=True, eq=False)
class NvlinkDispatch:
    """DispatchHandle.state. The tensors are this rank's own routing, kept until combine has read it."""

    x_TH: Tensor
    slot_idx_TK: Tensor
    num_rounds: int
    buffer_set: int  # which of num_buffers


class NvlinkBackend(CheckedBackend):
    """Construction and close() are collective. All calls go to one CUDA stream at a time, in the order of the calls.

    Received tensors are buffers of the backend, valid until combine_recv of their handle. Tensors passed in must stay
    unchanged until the GPU has done the call.

    A wait past config.timeout_s masks the rank it waited for and lets the kernel go on without that rank's tokens and
    outputs; the next call raises EPTimeoutError, once, which names the first of those that were late at a time:
    query_mask tells all. A caller that catches it may repeat that call and go on: other ranks' results stay right.

    max_rows: that a dispatch can bring at most.
    """

    kernels: Any  # LowLatency or Normal

    def __init__(self, config: EPConfig, group: EPGroup, options: NvlinkOptions, max_rows: int):
        super().__init__(config, group, options, max_rows)
        self.options, self.max_rows = options, max_rows
        self._summed: dict[int, Tensor] = {}  # epoch -> what combine_start has launched the sums into
        # How the arguments of the last good call look. A call that looks alike is not checked again: a check takes as
        # long as the GPU needs for some tokens.
        self._good_tokens: tuple | None = None
        self._good_outputs: tuple | None = None
        self._call_context = CallContext(group, config.timeout_s, config.top_k, config.num_slots)
        self._check_machine()
        self._device = torch.cuda.current_device()
        self._readback: Readback | None = None
        self._kernel_wait: KernelWait | None = None
        self._alive = group.view.alive  # of the ranks that exchange
        self._halted: EPError | None = None  # what check() raises until restart()
        self._halting = threading.Lock()

    def _check_machine(self) -> None:
        config, fail = self.config, self._checks.fail
        if not torch.cuda.is_available():
            fail("the nvlink backend needs an NVIDIA GPU and a CUDA build of torch; use backend='cpu'")
        if config.dtype != torch.bfloat16:
            fail(f"dtype={config.dtype}: the nvlink backend moves torch.bfloat16; cast, or use backend='cpu'")
        if config.hidden_size % 16:
            fail(f"hidden_size={config.hidden_size}: the nvlink backend needs a multiple of 16; pad the hidden size")
        for what, value, most, remedy in self._limits():
            if value > most:
                fail(f"{what} = {value}: the nvlink backend takes at most {most}; {remedy}")

    # -- what the two modes do differently --

    @abstractmethod
    def _limits(self) -> tuple[tuple[str, int, int, str], ...]:
        """(what, value, largest, remedy)"""

    @abstractmethod
    def _check_rounds(self, num_rounds: int) -> None:
        """Fails where ranks cannot learn of each other's rounds."""

    @abstractmethod
    def _launch_dispatch(self, handle: DispatchHandle, phases: int) -> None: ...

    @abstractmethod
    def _received(self, handle: DispatchHandle) -> Received:
        """What the dispatch, whose receive has been launched, brings. May wait for the host's counts."""

    @abstractmethod
    def _num_rows(self, handle: DispatchHandle) -> int:
        """Of x_RH and y_RH."""

    @abstractmethod
    def _launch_combine_send(self, handle: DispatchHandle, y_RH: Tensor, signal: Any) -> None: ...

    @abstractmethod
    def _launch_combine_recv(self, handle: DispatchHandle, y_TH: Tensor, y_RH: Tensor | None = None) -> None:
        """y_RH: combine_send too, in the same launch. The last launch of a handle."""

    @abstractmethod
    def _check_signal(self, signal: Any) -> None: ...

    # -- the four calls --

    def dispatch_send(
        self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor, num_rounds: int = 1
    ) -> DispatchHandle:
        handle = self._new_handle(x_TH, slot_idx_TK, topk_weights_TK, num_rounds)
        self._launch_dispatch(handle, SEND)
        return handle

    def dispatch_start(self, handle: DispatchHandle) -> None:
        self._enter_ahead(DISPATCH_RECV, handle)
        self._launch_dispatch(handle, RECV)
        self._order.launch(DISPATCH_RECV, handle.epoch)

    def dispatch_recv(self, handle: DispatchHandle) -> Received:
        self._enter(DISPATCH_RECV, handle)
        if not self._order.is_launched(DISPATCH_RECV, handle.epoch):
            self._launch_dispatch(handle, RECV)
        return self._complete_dispatch(handle)

    def combine_send(self, y_RH: Tensor, handle: DispatchHandle, signal: Any = None) -> None:
        """signal: send tile by tile while the experts still compute (needs no order of slots, only progress)."""
        self._enter(COMBINE_SEND, handle)
        self._check_outputs(y_RH, handle, signal)
        self._launch_combine_send(handle, y_RH, signal)
        self._order.complete(COMBINE_SEND, handle.epoch)

    def combine_start(self, handle: DispatchHandle) -> None:
        self._enter_ahead(COMBINE_RECV, handle)
        self._summed[handle.epoch] = y_TH = torch.empty_like(handle.state.x_TH)
        self._launch_combine_recv(handle, y_TH)
        self._order.launch(COMBINE_RECV, handle.epoch)

    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        self._enter(COMBINE_RECV, handle)
        if self._order.is_launched(COMBINE_RECV, handle.epoch):
            y_TH = self._summed.pop(handle.epoch)
        else:
            y_TH = torch.empty_like(handle.state.x_TH)
            self._launch_combine_recv(handle, y_TH)
        self._order.complete(COMBINE_RECV, handle.epoch)
        return y_TH

    # -- two calls in one launch: less latency when there is nothing to compute in between --

    def sends_in_background(self) -> bool:
        """A stream runs one kernel after the other; one that sends and receives may take more SMs."""
        return False

    def dispatch(
        self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor, num_rounds: int = 1
    ) -> tuple[DispatchHandle, Received]:
        handle = self._new_handle(x_TH, slot_idx_TK, topk_weights_TK, num_rounds)
        self._launch_dispatch(handle, SEND | RECV)
        return handle, self._complete_dispatch(handle)

    def combine(self, y_RH: Tensor, handle: DispatchHandle) -> Tensor:
        self._enter(COMBINE_SEND, handle)
        self._check_outputs(y_RH, handle, None)
        if not self._order.is_oldest(handle.epoch):  # combine_recv is out of order
            self._order.complete(COMBINE_SEND, handle.epoch)
            self._launch_combine_send(handle, y_RH, None)  # what may go, goes, as with the two calls
            self._order.check(COMBINE_RECV, handle.epoch)
        y_TH = torch.empty_like(handle.state.x_TH)
        self._launch_combine_recv(handle, y_TH, y_RH)
        self._order.complete(COMBINE_RECV, handle.epoch)
        return y_TH

    # -- beside the calls --

    def set_deadline(self, timeout_s: float, named: str = CONFIGURED_DEADLINE) -> None:
        self.kernels.set_deadline(timeout_s)
        self._call_context = replace(self._call_context, timeout_s=timeout_s, deadline=named)

    def mask_rank(self, rank: int, masked: bool = True) -> None:
        """Goes on without a rank: nothing is sent to it, nobody waits for it, its outputs add nothing.

        On this rank only: every rank decides, or learns at its deadline. A kernel that waits for the rank goes on at
        once. masked=False takes back a rank that has made all calls; after missed ones, use readmit.
        """
        if not 0 <= rank < self.group.size or rank == self.group.rank:
            self._checks.fail(f"mask_rank({rank}): name another rank of 0..{self.group.size - 1}")
        if masked:
            self.kernels.rank_mask.write([True], rank)
        else:
            self.kernels.rank_mask.take_back(rank)

    def readmit(self) -> None:
        """Goes on with all ranks again, those included that were masked and have missed calls.

        Collective: every rank of the group calls it, between two steps, with no handle in flight. Waits for the GPU and
        for the other ranks. A rank whose process has died cannot come back: make a new group. RuntimeError, on all
        ranks, when one has a handle in flight.
        """
        self._check_open("readmit")
        everyone = self.group.allgather((self._order.num_completed, self._order.in_flight))
        if problem := next((problem for _, problem in everyone if problem), None):
            raise RuntimeError(problem)
        self._order.restart(max(completed for completed, _ in everyone))
        self.kernels.readmit()
        take_failure(self.kernels.failure.words, self._call_context)

    @property
    def epoch(self) -> int:
        """Above that of any call of any rank so far: a lost rank may have begun as many dispatches as there are
        buffers to which the others had not come."""
        return self.kernels.num_calls + 2 * self.config.num_buffers

    def require_restartable(self) -> None:
        if self.group.fd_desk() is None:
            self._checks.fail("these ranks cannot be replaced; eprt serve -n N --max-lost-ranks F starts some that can")

    def halt(self, error: EPError, view_number: int) -> None:
        with self._halting:
            if self._halted is None and view_number == self.group.view.number:
                self._halted = error
                self.kernels.halt()

    def restart(self, epoch: int) -> None:
        """Waits for the GPU and, after halt(), for the end of processes that were lost: as long as they live, their
        kernels may write into this rank's memory."""
        torch.cuda.synchronize()
        alive = self.group.view.alive
        if self._halted is not None:
            self.group.wait_ended([rank for rank, was in enumerate(self._alive) if was and not alive[rank]])
        self._summed.clear()
        self._order.restart(epoch - 1)
        with self._halting:
            self.kernels.restart(epoch - 1, alive)
            self._alive, self._halted = alive, None

    def query_mask(self) -> Tensor:
        """int32 [N] on the GPU: 1 for masked ranks."""
        return self.kernels.mask.clone()

    def stats(self, reset: bool = False) -> EPStats:
        """What the kernels counted since the last reset. Waits for the GPU. Waits are as thread block 0 saw them."""
        self._check_open("stats")
        totals = self.kernels.totals.tensors()
        counted = [total.cpu().numpy().copy() for total in totals]
        if reset:
            for total in totals:
                total.zero_()
        return _stats_from_totals(*counted)

    def recent_stats(self) -> EPStats:
        """The same without waiting: of a GPU that is busy, as recent as Readback says."""
        self._check_open("recent_stats")
        self._readback = self._readback or Readback(self.kernels.totals.tensors())
        return _stats_from_totals(*self._readback.read())

    def check(self) -> None:
        """Raises what a kernel has reported by now and no call has raised yet, once. Does not wait for the GPU."""
        if self._halted is not None:
            raise self._halted.with_traceback(None)
        words = self.kernels.failure.words
        if words[0] and (error := take_failure(words, self._call_context)):
            self.kernels.mask[self.group.rank].zero_()  # it waited for itself: for a tile that did not come
            raise error

    def current_wait(self) -> CurrentWait | None:
        if self._closed:
            return None
        self._kernel_wait = self._kernel_wait or KernelWait(self.kernels.waiting.words)
        return self._kernel_wait.look()

    def require_recordable(self) -> None:
        """Nothing here waits for the GPU."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.kernels.close()

    # -- inside --

    def _set_of(self, handle: DispatchHandle) -> int:
        return handle.state.buffer_set

    def _new_handle(
        self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor, num_rounds: int = 1
    ) -> DispatchHandle:
        self._check_open("dispatch_send")
        shape = x_TH.shape
        of_x = shape, x_TH.dtype, x_TH.get_device(), x_TH.is_contiguous()
        of_slots = slot_idx_TK.shape, slot_idx_TK.dtype, slot_idx_TK.get_device(), slot_idx_TK.is_contiguous()
        of_weights = (
            topk_weights_TK.shape,
            topk_weights_TK.dtype,
            topk_weights_TK.get_device(),
            topk_weights_TK.is_contiguous(),
        )
        looks = of_x, of_slots, of_weights, num_rounds
        if looks != self._good_tokens:
            self._check_tokens(x_TH, slot_idx_TK, topk_weights_TK, num_rounds)
            whole = of_x[3], of_slots[3], of_weights[3]
            self._good_tokens = looks if all(whole) else None
            x_TH, slot_idx_TK, topk_weights_TK = (t.contiguous() for t in (x_TH, slot_idx_TK, topk_weights_TK))
        if x_TH.data_ptr() % 16:
            self._checks.aligned("dispatch_send: x_TH", x_TH)
        self.check()
        order = self._order
        epoch = order.next_epoch()
        order.complete(DISPATCH_SEND, epoch)
        state = NvlinkDispatch(x_TH, slot_idx_TK, num_rounds, epoch % self.config.num_buffers)
        return DispatchHandle(shape[0], epoch, topk_weights_TK, self, state)

    def _check_tokens(self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor, num_rounds: int) -> None:
        self._checks.tokens(x_TH, slot_idx_TK, topk_weights_TK, num_rounds)
        for name, tensor in (("x_TH", x_TH), ("slot_idx_TK", slot_idx_TK), ("topk_weights_TK", topk_weights_TK)):
            self._check_on_gpu(f"dispatch_send: {name}", tensor)
        self._check_rounds(num_rounds)

    def _complete_dispatch(self, handle: DispatchHandle) -> Received:
        received = self._received(handle)
        self._order.complete(DISPATCH_RECV, handle.epoch)
        return received

    def _enter_ahead(self, call: int, handle: DispatchHandle) -> None:
        self._check_open(CALLS[call])
        self._checks.owner(call, handle, self)
        self.check()
        self._order.check_launch(call, handle.epoch)

    def _check_outputs(self, y_RH: Tensor, handle: DispatchHandle, signal: Any) -> None:
        if signal is not None:
            self._check_signal(signal)
        num_rows = self._num_rows(handle)
        looks = y_RH.shape, y_RH.dtype, y_RH.get_device(), y_RH.is_contiguous(), num_rows
        if looks != self._good_outputs:
            self._checks.outputs(y_RH, num_rows)
            self._check_on_gpu("combine_send: y_RH", y_RH)
            if not y_RH.is_contiguous():
                self._checks.fail("combine_send: y_RH is not contiguous; a copy here would hide a slow path")
            self._good_outputs = looks
        if y_RH.data_ptr() % 16:
            self._checks.aligned("combine_send: y_RH", y_RH)

    def _check_on_gpu(self, what: str, tensor: Tensor) -> None:
        if tensor.get_device() != self._device:
            self._checks.fail(f"{what} is on {tensor.device}; the nvlink backend takes tensors of this rank's GPU")


def _stats_from_totals(
    wait_ns: np.ndarray, tokens: np.ndarray, calls: np.ndarray, compute_ns: np.ndarray, blocked_ns: np.ndarray
) -> EPStats:
    """As KernelTotals has them."""
    dispatch_us_N, combine_us_N = wait_ns[:, 0] / 1e3
    compute_us, blocked_us = float(compute_ns[0]) / 1e3, float(blocked_ns[0]) / 1e3
    return EPStats(int(calls[0]), dispatch_us_N, combine_us_N, tokens[1], tokens[0], compute_us, blocked_us)
