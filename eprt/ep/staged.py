"""StagedBackend: GPUs through host memory: the cpu backend, with copies before and behind it.

Slow, but right in any dtype and between any GPUs: for models in float32, and where GPUs reach each other by no NVLink.
Every call waits for the GPU.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from eprt.ep.api import Backend, DispatchHandle, Received
from eprt.ep.cpu.backend import CpuBackend


class StagedBackend(CpuBackend):
    """Construction and close() are collective. As CpuBackend, for tensors of this rank's current GPU."""

    combine_buffer = Backend.combine_buffer  # on the GPU

    def dispatch_send(
        self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor, num_rounds: int = 1
    ) -> DispatchHandle:
        return super().dispatch_send(x_TH.cpu(), slot_idx_TK.cpu(), topk_weights_TK.cpu(), num_rounds)

    def dispatch_recv(self, handle: DispatchHandle) -> Received:
        host = super().dispatch_recv(handle)
        scale_RG = None if host.scale_RG is None else host.scale_RG.cuda()
        return replace(host, x_RH=host.x_RH.cuda(), recv_count_E=host.recv_count_E.cuda(), scale_RG=scale_RG)

    def combine_send(self, y_RH: Tensor, handle: DispatchHandle, signal: Any = None) -> None:
        super().combine_send(self.output_buffer(handle).copy_(y_RH), handle, signal)

    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        return super().combine_recv(handle).cuda()
