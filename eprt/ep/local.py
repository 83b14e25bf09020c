"""LocalBackend: the four verbs for a group of one, without any memory but the caller's."""

import torch
from torch import Tensor

from eprt.ep.api import DispatchHandle, EPConfig, Received
from eprt.ep.group import EPGroup


class LocalBackend:
    def __init__(self, config: EPConfig, group: EPGroup):
        if group.size != 1:
            raise ValueError(f"[rank {group.rank}/{group.size}] the local backend serves groups of one")
        self.config, self.group, self._epoch, self._y = config, group, 0, {}

    def dispatch_send(
        self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor, num_rounds: int = 1
    ) -> DispatchHandle:
        self._epoch += 1
        slots = slot_idx_TK.flatten().long()
        order = torch.argsort(slots, stable=True)[(slots < 0).sum() :]
        return DispatchHandle(x_TH.shape[0], self._epoch, topk_weights_TK, (x_TH, slots, order, num_rounds))

    def dispatch_recv(self, handle: DispatchHandle) -> Received:
        x_TH, slots, order, num_rounds = handle.state
        count = torch.bincount(slots[order], minlength=self.config.num_slots).int()
        return Received(x_TH[order // self.config.top_k], count, None, num_rounds)

    def combine_send(self, y_RH: Tensor, handle: DispatchHandle, signal=None) -> None:
        self._y[handle.epoch] = y_RH

    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        _, slots, order, _ = handle.state
        y_RH = self._y.pop(handle.epoch).float()
        rows = torch.zeros(slots.shape[0], y_RH.shape[1])
        rows[order] = y_RH
        weights = handle.topk_weights_TK
        rows_TKH = rows.view(*weights.shape, rows.shape[1])
        out = torch.zeros(handle.num_tokens, y_RH.shape[1])
        for k in range(weights.shape[1]):
            out += weights[:, k : k + 1] * rows_TKH[:, k]
        return out.to(self.config.dtype)

    def close(self) -> None:
        pass
