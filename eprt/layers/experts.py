"""Experts: the routed experts that live on this rank, as one grouped GEMM, and the memory they lie in."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eprt import ops
from eprt.config import MoEConfig
from eprt.ep.api import Received
from eprt.gpu.readback import overwrite
from eprt.layers.linear import Matrix, padded_intermediate_size, swiglu_weights
from eprt.ops.known_rows import KnownRows
from eprt.ops.signal import TileSignal
from eprt.ops.weight import BLOCK, FP4_BLOCK, Weight, require_gpu_scales


class ExpertPool:
    """M weight buffers for experts of one shape and format, shared by layers: w13 [M, 2I', H] and w2 [M, H, I'].

    I' is I, padded to whole blocks for fp8. Each buffer holds one expert of any layer, so that an expert can arrive in
    a spare buffer while the old ones serve, and take its place by a change of indices. Buffers that never get an expert
    are reserved but, on the CPU, never touched.

    weight_format: default the config's.
    """

    def __init__(
        self, config: MoEConfig, num_buffers: int, weight_format: str | None = None, device: torch.device | str = "cpu"
    ):
        self.weight_format, self.dtype = weight_format or config.weight_format, config.dtype
        self.swiglu_limit = config.swiglu_limit
        self.device = torch.device(device)
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        stored_size = padded_intermediate_size(self.intermediate_size, self.weight_format)
        kind = (self.weight_format, self.dtype, self.device)
        self.w13 = _empty_stack(num_buffers, 2 * stored_size, self.hidden_size, *kind)
        self.w2 = _empty_stack(num_buffers, self.hidden_size, stored_size, *kind)
        parts = (self.w13.data, self.w13.scale, self.w2.data, self.w2.scale)
        # uint8 [M, bytes of one], the same memory, in the same order and sizes on every rank, scales included.
        self.parts = [part.view(num_buffers, -1).view(torch.uint8) for part in parts if part is not None]
        self.expert_bytes = sum(part.shape[1] for part in self.parts)
        self._free = list(range(num_buffers - 1, -1, -1))

    def weights_of(self, buffer: int) -> tuple[Weight, Weight]:
        """(w13 [2I', H], w2 [H, I']) of one expert: views."""
        w13, w2 = (
            Weight(stack.data[buffer], None if stack.scale is None else stack.scale[buffer])
            for stack in (self.w13, self.w2)
        )
        return w13, w2

    def moved_to(self, config: MoEConfig, device: torch.device) -> "ExpertPool":
        """The same buffers on another device, and in the config's dtype unless they are quantised."""
        pool = ExpertPool(config, len(self.parts[0]), self.weight_format, device)
        for new, old in ((pool.w13, self.w13), (pool.w2, self.w2)):
            new.data.copy_(old.data)
            if new.scale is not None and old.scale is not None:
                new.scale.copy_(old.scale)
        pool._free = list(self._free)
        return pool

    @torch.no_grad()
    def fill_buffer(self, buffer: int, gate_IH: Matrix, up_IH: Matrix, down_HI: Matrix) -> None:
        """Copies one expert into the buffer, converting it to the pool's format. ValueError where this device cannot
        compute with its scales."""
        new_w13, new_w2 = swiglu_weights(gate_IH, up_IH, down_HI, self.weight_format, self.dtype)
        if self.device.type == "cuda":
            require_gpu_scales(new_w13)
            require_gpu_scales(new_w2)
        for stack, new in ((self.w13, new_w13), (self.w2, new_w2)):
            stack.data[buffer].copy_(new.data)
            if stack.scale is not None and new.scale is not None:
                stack.scale[buffer].copy_(new.scale)

    def take_buffer(self) -> int:
        if not self._free:
            raise RuntimeError(f"all {len(self.parts[0])} weight buffers of the expert pool are in use")
        return self._free.pop()

    def return_buffer(self, buffer: int) -> None:
        self._free.append(buffer)


def expert_bytes(config: MoEConfig, weight_format: str) -> int:
    """What one expert takes in an ExpertPool of the format."""
    return ExpertPool(config, 1, weight_format, "meta").expert_bytes


class Experts:
    """This rank's E slots of one layer."""

    def __init__(self, num_slots: int, pool: ExpertPool):
        self.pool = pool
        self.buffers = [-1] * num_slots  # which buffer of the pool holds each slot's expert, -1 for none
        # The same, int32, where the pool is. It keeps its address: a recorded CUDA graph sees what place() changes.
        self.buffer_E = torch.full((num_slots,), -1, dtype=torch.int32, device=pool.device)

    def place(self, buffers: Sequence[int]) -> None:
        """From now on, in the order of the current stream, the slots' experts lie in these buffers."""
        self.buffers = list(buffers)
        overwrite(self.buffer_E, torch.tensor(self.buffers, dtype=torch.int32))

    @torch.no_grad()
    def load_expert(self, slot: int, gate_IH: Matrix, up_IH: Matrix, down_HI: Matrix) -> None:
        """Copies one expert into local slot `slot`, converting it to the pool's format."""
        pool = self.pool
        sizes = (pool.intermediate_size, pool.hidden_size)
        for name, weight, want in (("gate", gate_IH, sizes), ("up", up_IH, sizes), ("down", down_HI, sizes[::-1])):
            if tuple(weight.shape) != want:
                raise ValueError(
                    f"{name} of the expert for slot {slot} has shape {tuple(weight.shape)}, expected {want}"
                )
        if (buffer := self.buffers[slot]) < 0:
            self.buffers[slot] = buffer = pool.take_buffer()
            self.buffer_E[slot] = buffer
        pool.fill_buffer(buffer, gate_IH, up_IH, down_HI)

    def __call__(
        self,
        received: Received,
        out_RH: Tensor,
        expected_rows: int | None = None,
        signal: TileSignal | None = None,
        num_sms: int | None = None,
    ) -> Tensor:
        """Writes the outputs of the received rows, in their order, into out_RH ([R, H] of dtype) and returns it.

        expected_rows: about how many there are, where only the GPU knows; it chooses how they are computed.
        signal: told as rows come to be there (GPUs only).
        num_sms: to compute on (GPUs only); default all.
        """
        w13, w2, buffer_E = self.pool.w13, self.pool.w2, self.buffer_E
        x_RH, count_E, scale_RG = received.x_RH, received.recv_count_E, received.scale_RG
        if signal is None:
            known = None if received.counts is None else KnownRows(received.counts, self.buffers)
            hints = expected_rows, num_sms, known
            return ops.grouped_experts(
                x_RH, count_E, w13, w2, out_RH, buffer_E, scale_RG, *hints, self.pool.swiglu_limit
            )
        hints = expected_rows, num_sms, self.pool.swiglu_limit
        inner = ops.experts_up(x_RH, count_E, w13, buffer_E, scale_RG, out_RH.dtype, *hints)
        return ops.experts_down(inner, w2, out_RH, signal, num_sms)


def _empty_stack(
    num_slots: int, n: int, k: int, weight_format: str, dtype: torch.dtype, device: torch.device
) -> Weight:
    if weight_format == "fp8":
        scale = torch.zeros(num_slots, -(-n // BLOCK), -(-k // BLOCK), device=device)
        return Weight(torch.empty(num_slots, n, k, dtype=torch.float8_e4m3fn, device=device), scale)
    if weight_format == "fp4":
        data, scale = (
            torch.empty(num_slots, n, k // each, dtype=torch.uint8, device=device) for each in (2, FP4_BLOCK)
        )
        return Weight(data, scale)
    if weight_format == "int8":
        data = torch.empty(num_slots, n, k, dtype=torch.int8, device=device)
        return Weight(data, torch.zeros(num_slots, n, device=device))
    return Weight(torch.empty(num_slots, n, k, dtype=dtype, device=device))
