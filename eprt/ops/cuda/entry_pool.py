"""The pooling of DeepSeek-V4's entries: one program per entry and some channels has all their tokens in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.shared_attention import paged_states

_LOG2E = tl.constexpr(1.4426950408889634)
_VALUES = 4096  # of a program, and as many gates


@triton.jit
def pooled(state, index, slot, channel, known, layout, num_slots, first_slots):
    """fp32: of each channel the sum of the values of its slots' tokens, weighted by the softmax over their gates.

    slot: of an index, [R, 1]. channel: [1, C]; known: which of them there are. layout: (rows of a page, distance of
    pages, of rows, and of gates from values; how many channels further the last slots' channels begin).
    """
    page_rows, page_stride, row_stride, gate_stride, later = layout
    token = tl.load(index + slot, mask=slot < num_slots, other=-1)
    at = state + token // page_rows * page_stride + token % page_rows * row_stride
    at = at + tl.where(slot < first_slots, 0, later) + channel
    has = (token >= 0) & known
    gate = tl.load(at + gate_stride, mask=has, other=float("-inf"))
    value = tl.load(at, mask=has, other=0.0)
    most = tl.max(gate, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    weight = tl.exp2((gate - base[None, :]) * _LOG2E)
    total = tl.sum(weight, 0)
    return tl.sum(weight * value, 0) / tl.where(total == 0, 1.0, total)


# Of prompts page_rows changes from step to step, and must not cause another compilation.
@triton.jit(do_not_specialize=["page_rows"])
def _pool_entries(
    out,
    state,
    index_XR,
    num_slots,
    first_slots,
    size,
    page_rows,
    page_stride,
    row_stride,
    gate_stride,
    later,
    SLOTS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    channel, slot = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, SLOTS)
    layout = page_rows, page_stride, row_stride, gate_stride, later
    index, known = index_XR + entry * num_slots, (channel < size)[None, :]
    value = pooled(state, index, slot[:, None], channel[None, :], known, layout, num_slots, first_slots)
    tl.store(out + entry * size + channel, value, mask=channel < size)


def pool_entries(state_S2C: Tensor, index_XR: Tensor, entry_size: int, first_slots: int) -> Tensor:
    """As eprt.ops.shared_attention.pool_entries. Tokens are not checked; an entry of none is 0."""
    (X, R), state_PS2C = index_XR.shape, paged_states(state_S2C, entry_size)
    out_XD = torch.empty(X, entry_size, dtype=torch.float32, device=state_S2C.device)
    slots = triton.next_power_of_2(R)
    channels = max(16, min(triton.next_power_of_2(entry_size), _VALUES // slots))
    if out_XD.numel():
        _pool_entries[(X, triton.cdiv(entry_size, channels))](
            out_XD,
            state_PS2C,
            index_XR.contiguous(),
            R,
            first_slots,
            entry_size,
            *layout_of(state_PS2C, entry_size),
            SLOTS=slots,
            CHANNELS=channels,
        )
    return out_XD


def layout_of(state_PS2C: Tensor, entry_size: int) -> tuple[int, ...]:
    return state_PS2C.shape[1], *state_PS2C.stride()[:3], state_PS2C.shape[3] - entry_size
