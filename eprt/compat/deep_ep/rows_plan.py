"""RowsPlans: checks and sizes of a dispatch of rows, computed once for arguments that look alike.

A prefill dispatches once per layer with tensors of the same shapes, dtypes and options. Knows nothing of memory or
launches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

import torch
from torch import Tensor

from eprt.compat.deep_ep.checks import facts
from eprt.ep.checks import not_aligned
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.failure import CallContext
from eprt.ep.nvlink.normal import MAX_SCALES, MAX_SLOTS, MAX_TOP_K, Payload, Routing, returned_stride
from eprt.ep.nvlink.normal_layout import BlockShape, LayoutShape

MAX_EXPERTS = 4096
_MOST_PLANS = 256
_GUESS_STEP = 512  # rows


@lru_cache(maxsize=256)
def block_shape(capacity: int, top_k: int, row_bytes: int, num_scales: int) -> BlockShape:
    return BlockShape(capacity, top_k, row_bytes, num_scales, grouped=False)


@dataclass(frozen=True)
class RowsPlan:
    """What a dispatch of rows needs to know of its arguments."""

    layout: LayoutShape  # of what the count leaves on the GPU
    top_k: int  # 0 without topk_idx
    row_bytes: int  # of a row of the payload
    num_scales: int  # of a row
    expected_rows: int  # received rows if every rank has as many tokens as this one and sends all of them here
    returned_bytes: int  # returned rows of a combine, at most
    asked: CallContext  # for errors

    def block_of(self, rows: int) -> BlockShape:
        """The block for so many received rows."""
        return block_shape(rows, self.top_k, self.row_bytes, self.num_scales)

    def guess_block(self, recent_rows: int, most: int) -> BlockShape:
        """The block for rows that have not been counted yet: it holds them if no rank has more tokens than this one, or
        if there are no more than the last dispatch received."""
        rows = self.expected_rows
        if recent_rows > rows:
            rows = min(-(-recent_rows // _GUESS_STEP) * _GUESS_STEP, most)
        return self.block_of(rows)


class RowsPlans:
    """The plans of a RowExchange, by the looks of their arguments.

    max_items: tokens to or from this rank, at most.
    size_name: what the caller calls the size of the symmetric memory, for errors.
    fail: raises a ValueError that names the rank.
    """

    def __init__(
        self, group: EPGroup, max_items: int, size_name: str, timeout_s: float, fail: Callable[[str], NoReturn]
    ):
        self._group, self._max_items, self._size_name = group, max_items, size_name
        self._timeout_s, self._fail = timeout_s, fail
        self._device = torch.cuda.current_device()
        self._plans: dict[tuple, RowsPlan] = {}

    def plan_for(self, payload: Payload, routing: Routing, worst_rows: int, alignment: int) -> RowsPlan:
        """The plan of a dispatch. ValueError for arguments that do not fit together."""
        x, scale = payload.x, payload.scale
        key = (
            facts(x),
            None if scale is None else (scale.shape, scale.dtype, scale.get_device()),
            facts(routing.topk_slot),
            facts(routing.topk_weight),
            facts(routing.in_rank),
            facts(routing.slot_tokens),
            routing.num_slots,
            worst_rows,
            alignment,
            routing.chunks,
        )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan(payload, routing, worst_rows, alignment)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        if x.data_ptr() % 16:
            self._fail_row(x)
        if not worst_rows and torch._C._cuda_isCurrentStreamCapturing():
            self._fail(
                "dispatch: the host cannot wait for counts while a CUDA graph is captured; pass num_worst_rows "
                "(num_worst_tokens of Buffer.dispatch), the most rows that can come"
            )
        return plan

    def _make_plan(self, payload: Payload, routing: Routing, worst_rows: int, alignment: int) -> RowsPlan:
        self.check_payload(payload)
        self._check_routing(routing, worst_rows, alignment)
        T, K, R = routing.num_tokens, routing.top_k, self._group.size
        layout = LayoutShape(T, K, routing.num_slots, R, routing.chunks.count)
        returned = T * min(K or R, R) * returned_stride(payload.x.shape[1], K)
        asked = CallContext(self._group, self._timeout_s, max(K, 1), routing.num_slots, "dispatch", "topk_idx")
        return RowsPlan(layout, K, payload.row_bytes, payload.num_scales, T * R, returned, asked)

    # -- checks --

    def check_payload(self, payload: Payload) -> None:
        x, scale = payload.x, payload.scale
        if x.dim() != 2 or not x.is_contiguous() or x.get_device() != self._device:
            self._fail(
                f"dispatch: x is {tuple(x.shape)} on {x.device}; it must be contiguous [T, H] on this rank's GPU"
            )
        if not payload.row_bytes or payload.row_bytes % 16 or x.data_ptr() % 16:
            self._fail_row(x)
        if scale is None:
            return
        fits = scale.dim() == 2 and scale.shape[0] == x.shape[0] and scale.element_size() == 4
        if not fits or scale.get_device() != self._device or scale.shape[1] > MAX_SCALES:
            self._fail(
                f"dispatch: scales are {scale.dtype} {tuple(scale.shape)} on {scale.device}; expected 4-byte elements "
                f"[{x.shape[0]}, up to {MAX_SCALES}] on this rank's GPU"
            )

    def _fail_row(self, x: Tensor) -> NoReturn:
        row_bytes = x.shape[1] * x.element_size()
        self._fail(f"dispatch: a row of x has {row_bytes} B; rows must be multiples of 16 B, not 0, at multiples of 16")

    def _check_routing(self, routing: Routing, worst_rows: int, alignment: int) -> None:
        T, S, R = routing.num_tokens, routing.num_slots, self._group.size
        if S < 1 or S % R or min(MAX_EXPERTS, MAX_SLOTS) < S:
            self._fail(f"dispatch: num_experts={S}: must be a multiple of the {R} ranks, at most {MAX_EXPERTS}")
        if alignment < 1:
            self._fail(f"dispatch: expert_alignment={alignment}: must be at least 1")
        if self._max_items < T * R:
            self._fail(f"dispatch: {T} tokens for {R} ranks are more than {self._size_name} allows for; make it larger")
        if worst_rows < 0:
            self._fail(f"dispatch: a static bound of {worst_rows} rows: must be positive, or 0 for none")
        if self._max_items < worst_rows:
            self._fail(f"dispatch: {worst_rows} rows are more than {self._size_name} allows for; make it larger")
        given = (routing.topk_slot is None, routing.topk_weight is None, routing.in_rank is not None)
        if given not in ((False, False, False), (True, True, True)):
            self._fail("dispatch: give topk_idx and topk_weights, or is_token_in_rank, and not both")
        if routing.topk_slot is not None and routing.topk_weight is not None:
            K = routing.top_k
            if not 1 <= K <= MAX_TOP_K:
                self._fail(f"dispatch: top-k is {K}: must be in 1..{MAX_TOP_K}")
            self.check_tensor("topk_idx", routing.topk_slot, (T, K), torch.int32, torch.int64)
            self.check_tensor("topk_weights", routing.topk_weight, (T, K), torch.float32)
        if routing.in_rank is not None:
            self.check_tensor("is_token_in_rank", routing.in_rank, (T, R), torch.bool)
            if routing.slot_tokens is None:
                self._fail("dispatch: is_token_in_rank needs num_tokens_per_expert")
            self.check_tensor("num_tokens_per_expert", routing.slot_tokens, (S,), torch.int32)

    def check_rows(self, what: str, tensor: Tensor, shape: tuple[int, int]) -> None:
        """ValueError unless tensor holds bf16 rows at a multiple of 16 bytes. what: its name and the verb "begin"."""
        self.check_tensor(what.rsplit(" ", 1)[0], tensor, shape, torch.bfloat16)
        if tensor.data_ptr() % 16:
            self._fail(not_aligned(what, tensor))

    def check_tensor(self, what: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
        if (
            tensor.shape != shape
            or tensor.dtype not in dtypes
            or tensor.get_device() != self._device
            or not tensor.is_contiguous()
        ):
            names = " or ".join(str(dtype) for dtype in dtypes)
            self._fail(
                f"{what}: {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected contiguous {names} "
                f"{shape} on this rank's GPU"
            )
