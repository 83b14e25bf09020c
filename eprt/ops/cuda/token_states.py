"""What DeepSeek-V4's compressors keep of each token, on GPUs: one program per token and piece of its values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.cuda.paged_rows import row_offset

_BLOCK = 1024


@triton.jit
def _insert_states(
    slots,
    slot_T,
    product,
    place,
    position_T,
    page_slots,
    page_stride,
    slot_stride,
    row_stride,
    num_values,
    num_places,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_T + row)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < 2 * num_values) & (slot >= 0)
    state = tl.load(product + row * row_stride + at, mask=inside)
    of_place = place + tl.load(position_T + row) % num_places * num_values + (at - num_values)
    is_gate = at >= num_values
    state = tl.where(is_gate, state + tl.load(of_place, mask=inside & is_gate, other=0.0), state)
    tl.store(slots + row_offset(slot, page_slots, page_stride, slot_stride) + at, state, mask=inside)


def insert_states(slots_PSX: Tensor, slot_T: Tensor, product_TC: Tensor, place_RC: Tensor, position_T: Tensor) -> None:
    """As eprt.ops.token_states.insert_states. Slots are not checked; the product stays."""
    (T, X), (R, C) = product_TC.shape, place_RC.shape
    fp32 = all(each.dtype == torch.float32 for each in (slots_PSX, product_TC, place_RC))
    if not fp32 or X != 2 * C or slots_PSX.shape[2] != X or slots_PSX.stride(2) != 1 or product_TC.stride(1) != 1:
        raise ValueError(
            f"slots {tuple(slots_PSX.shape)}, product {tuple(product_TC.shape)}, places {tuple(place_RC.shape)}: must "
            "be fp32 [P, S, 2C], [T, 2C] and [R, C], each row contiguous"
        )
    if not T:
        return
    block = min(_BLOCK, triton.next_power_of_2(X))
    _insert_states[(T, triton.cdiv(X, block))](
        slots_PSX,
        slot_T,
        product_TC,
        place_RC.contiguous(),
        position_T,
        slots_PSX.shape[1],
        *slots_PSX.stride()[:2],
        product_TC.stride(0),
        C,
        R,
        BLOCK=block,
        num_warps=max(1, min(4, block // 128)),
    )
