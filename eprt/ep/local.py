"""LocalBackend: the EP calls where all experts are on this rank. Nothing is sent; rows are sorted by slot.

On any device, in any dtype. Shapes depend on shapes alone and nothing waits for a GPU, so all calls may be captured in
a CUDA graph.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eprt import ops
from eprt.ep.api import DispatchHandle, Received
from eprt.ep.checked_backend import CheckedBackend
from eprt.ep.config import EPConfig
from eprt.ep.group.group import EPGroup
from eprt.ep.order import COMBINE_RECV, COMBINE_SEND, DISPATCH_RECV, DISPATCH_SEND


@dataclass(frozen=True)
class LocalDispatch:
    """DispatchHandle.state."""

    x_TH: Tensor
    slot_idx_TK: Tensor
    entry_R: Tensor  # int64, the entry t * K + k of each row
    row_TK: Tensor  # int64, the row of each entry
    num_rounds: int
    y_RH: list[Tensor]  # the outputs, once combine_send has them


class LocalBackend(CheckedBackend):
    """One rank. x_RH has T * K rows, the filled ones first: masked entries (-1) are counted in no slot and come last.

    config.payload makes no difference: nothing crosses a wire. Values of slot_idx_TK are not checked.
    """

    def __init__(self, config: EPConfig, group: EPGroup):
        super().__init__(config, group)
        if group.size != 1:
            self._checks.fail("the local backend is for one rank; use nvlink or staged on GPUs, cpu on CPUs")

    def dispatch_send(
        self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor, num_rounds: int = 1
    ) -> DispatchHandle:
        self._check_open("dispatch_send")
        self._checks.tokens(x_TH, slot_idx_TK, topk_weights_TK, num_rounds)
        epoch = self._order.next_epoch()
        self._order.complete(DISPATCH_SEND, epoch)
        slot_A = slot_idx_TK.reshape(-1).long()
        last_A = torch.where(slot_A < 0, self.config.num_slots, slot_A)
        entry_R = last_A.argsort(stable=True)
        row_A = torch.empty_like(entry_R)
        row_A[entry_R] = torch.arange(len(entry_R), device=entry_R.device)
        state = LocalDispatch(x_TH, slot_idx_TK, entry_R, row_A.view(slot_idx_TK.shape), num_rounds, [])
        return DispatchHandle(x_TH.shape[0], epoch, topk_weights_TK, self, state)

    def dispatch_recv(self, handle: DispatchHandle) -> Received:
        self._enter(DISPATCH_RECV, handle)
        self._order.complete(DISPATCH_RECV, handle.epoch)
        state: LocalDispatch = handle.state
        slot_A = state.slot_idx_TK.reshape(-1).long()
        count = torch.zeros(self.config.num_slots + 1, dtype=torch.int32, device=slot_A.device)
        count.scatter_add_(0, slot_A + 1, torch.ones_like(slot_A, dtype=torch.int32))
        x_RH = state.x_TH[state.entry_R // self.config.top_k]
        return Received(x_RH, count[1:], num_rounds=state.num_rounds)

    def combine_send(self, y_RH: Tensor, handle: DispatchHandle, signal: Any = None) -> None:
        self._enter(COMBINE_SEND, handle)
        self._checks.no_signal(signal, "signal: the local backend has nothing to send tile by tile")
        self._checks.outputs(y_RH, handle.state.entry_R.shape[0])
        handle.state.y_RH.append(y_RH)
        self._order.complete(COMBINE_SEND, handle.epoch)

    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        self._enter(COMBINE_RECV, handle)
        self._order.complete(COMBINE_RECV, handle.epoch)
        state: LocalDispatch = handle.state
        (y_RH,) = state.y_RH
        row_TK = torch.where(state.slot_idx_TK < 0, -1, state.row_TK)
        return ops.sum_rows(y_RH, row_TK, handle.topk_weights_TK)

    def require_recordable(self) -> None:
        """All of its calls are."""

    def close(self) -> None:
        self._closed = True
