"""LocalBackend: the EP calls where all experts are on this rank. Nothing is sent; rows are sorted by slot.

On any device, in any dtype. Shapes depend on shapes alone and nothing waits for a GPU, so all calls may be captured in
a CUDA graph.
"""

from dataclasses import dataclass
from typing import Any

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
    row_TK: Tensor  # int64, the row of each entry, -1 for a masked one
    token_R: Tensor  # int64, the token of each row
    count_E: Tensor  # int32, rows of each slot
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
        state = LocalDispatch(x_TH, *ops.place_rows(slot_idx_TK, self.config.num_slots), num_rounds, [])
        return DispatchHandle(x_TH.shape[0], epoch, topk_weights_TK, self, state)

    def dispatch_recv(self, handle: DispatchHandle) -> Received:
        self._enter(DISPATCH_RECV, handle)
        self._order.complete(DISPATCH_RECV, handle.epoch)
        state: LocalDispatch = handle.state
        x_RH = state.x_TH.index_select(0, state.token_R)
        return Received(x_RH, state.count_E, num_rounds=state.num_rounds)

    def combine_send(self, y_RH: Tensor, handle: DispatchHandle, signal: Any = None) -> None:
        self._enter(COMBINE_SEND, handle)
        self._checks.no_signal(signal, "signal: the local backend has nothing to send tile by tile")
        self._checks.outputs(y_RH, handle.state.token_R.shape[0])
        handle.state.y_RH.append(y_RH)
        self._order.complete(COMBINE_SEND, handle.epoch)

    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        self._enter(COMBINE_RECV, handle)
        self._order.complete(COMBINE_RECV, handle.epoch)
        state: LocalDispatch = handle.state
        (y_RH,) = state.y_RH
        return ops.sum_rows(y_RH, state.row_TK, handle.topk_weights_TK)

    def is_alone(self) -> bool:
        return True

    def require_restartable(self) -> None:
        """Nobody else is there."""

    def restart(self, epoch: int) -> None:
        self._order.restart(epoch - 1)

    def restart_without_lost(self) -> None:
        """Nobody can be lost."""

    def require_recordable(self) -> None:
        """All of its calls are."""

    def close(self) -> None:
        self._closed = True
