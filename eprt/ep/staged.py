"""StagedBackend: GPUs through host memory: the cpu backend, with copies before and behind it.

Slow, but right in any dtype and between any GPUs: for models in float32, and where GPUs reach each other by no NVLink.
Every call waits for the GPU.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from eprt.ep.api import Backend, DispatchHandle, Received
from eprt.ep.config import EPConfig
from eprt.ep.cpu.backend import CpuBackend
from eprt.ep.group.group import EPGroup
from eprt.ep.stats import EPStats


class StagedBackend(Backend):
    """Construction and close() are collective. As CpuBackend, for tensors of this rank's current GPU."""

    def __init__(self, config: EPConfig, group: EPGroup):
        self.config, self.group = config, group
        self._host = CpuBackend(replace(config, device="cpu"), group)

    def dispatch_send(
        self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor, num_rounds: int = 1
    ) -> DispatchHandle:
        return self._host.dispatch_send(x_TH.cpu(), slot_idx_TK.cpu(), topk_weights_TK.cpu(), num_rounds)

    def dispatch_recv(self, handle: DispatchHandle) -> Received:
        host = self._host.dispatch_recv(handle)
        scale_RG = None if host.scale_RG is None else host.scale_RG.cuda()
        return replace(host, x_RH=host.x_RH.cuda(), recv_count_E=host.recv_count_E.cuda(), scale_RG=scale_RG)

    def combine_send(self, y_RH: Tensor, handle: DispatchHandle, signal: Any = None) -> None:
        host_RH = self._host.output_buffer(handle)
        self._host.combine_send(host_RH.copy_(y_RH), handle, signal)

    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        return self._host.combine_recv(handle).cuda()

    def stats(self, reset: bool = False) -> EPStats:
        return self._host.stats(reset)

    def close(self) -> None:
        self._host.close()
