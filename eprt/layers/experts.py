"""Experts: the routed experts that live on this rank, as one grouped GEMM."""

import torch
from torch import Tensor

from eprt import ops
from eprt.ep.api import Received
from eprt.layers.linear import padded_intermediate_size, swiglu_weights
from eprt.ops.weight import BLOCK, Weight


class Experts:
    """w13 [E, 2I', H] and w2 [E, H, I'] of this rank's E slots; I' is I, padded to whole blocks for fp8.

    Memory of slots that never get an expert is reserved but never touched.
    """

    def __init__(
        self, num_slots: int, hidden_size: int, intermediate_size: int, weight_format: str, dtype: torch.dtype
    ):
        self.weight_format, self.dtype = weight_format, dtype
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        stored_size = padded_intermediate_size(intermediate_size, weight_format)
        self.w13 = _empty_stack(num_slots, 2 * stored_size, hidden_size, weight_format, dtype)
        self.w2 = _empty_stack(num_slots, hidden_size, stored_size, weight_format, dtype)

    def load_expert(
        self, slot: int, gate_IH: Tensor | Weight, up_IH: Tensor | Weight, down_HI: Tensor | Weight
    ) -> None:
        """Copies one expert into local slot `slot`, converting it to this layer's format."""
        sizes = (self.intermediate_size, self.hidden_size)
        for name, weight, want in (("gate", gate_IH, sizes), ("up", up_IH, sizes), ("down", down_HI, sizes[::-1])):
            if tuple(weight.shape) != want:
                raise ValueError(
                    f"{name} of the expert for slot {slot} has shape {tuple(weight.shape)}, expected {want}"
                )
        new_w13, new_w2 = swiglu_weights(gate_IH, up_IH, down_HI, self.weight_format, self.dtype)
        for stack, new in ((self.w13, new_w13), (self.w2, new_w2)):
            stack.data[slot].copy_(new.data)
            if stack.scale is not None and new.scale is not None:
                stack.scale[slot].copy_(new.scale)

    def __call__(self, received: Received, out_RH: Tensor) -> Tensor:
        """Writes the outputs of the received rows, in their order, into out_RH ([R, H] of dtype) and returns it."""
        x_RH, y_RH = received.x_RH, out_RH
        if received.scale_RG is not None:
            # Buffers of a static shape hold more rows than came.
            num_rows = int(received.recv_count_E.sum())
            x_RH, y_RH = _dequantize_rows(x_RH[:num_rows], received.scale_RG[:num_rows], self.dtype), out_RH[:num_rows]
        ops.grouped_experts(x_RH, received.recv_count_E, self.w13, self.w2, y_RH)
        return out_RH


def _empty_stack(num_slots: int, n: int, k: int, weight_format: str, dtype: torch.dtype) -> Weight:
    if weight_format == "fp8":
        scale = torch.zeros(num_slots, -(-n // BLOCK), -(-k // BLOCK))
        return Weight(torch.empty(num_slots, n, k, dtype=torch.float8_e4m3fn), scale)
    if weight_format == "int8":
        return Weight(torch.empty(num_slots, n, k, dtype=torch.int8), torch.zeros(num_slots, n))
    return Weight(torch.empty(num_slots, n, k, dtype=dtype))


def _dequantize_rows(x_RH: Tensor, scale_RG: Tensor, dtype: torch.dtype) -> Tensor:
    scale_RH = scale_RG.repeat_interleave(BLOCK, dim=1)[:, : x_RH.shape[1]]
    return (x_RH.float() * scale_RH).to(dtype)
