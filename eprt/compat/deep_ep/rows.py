"""RowExchange: dispatch and combine with one row per (token, destination rank), as DeepEP's normal mode has them.

The kernels are those of the nvlink backend's normal mode (ep/nvlink/normal.py). Received rows are not grouped by expert
but ordered by (source rank, token), each row once. combine sums the rows that ranks return for a token, unweighted.
Launches on the current stream. Knows nothing of asynchronous calls or events.

T tokens of this rank, N rows received, H hidden, K top-k, R ranks, S experts of all ranks, E experts of a rank.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from eprt.compat.deep_ep.pool import Block, PoolFullError
from eprt.compat.deep_ep.rows_plan import MAX_EXPERTS, RowsPlan, RowsPlans, block_shape
from eprt.compat.deep_ep.rows_received import ReceivedRows, RowsHandle, RowTensors
from eprt.compat.deep_ep.stream_pool import StreamPool
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.failure import CallContext, take_failure
from eprt.ep.nvlink.kernel_state import KernelOptions
from eprt.ep.nvlink.normal import MAX_RANKS, MAX_TOP_K, Normal, Payload, Routing, returned_stride
from eprt.ep.nvlink.normal_grid import MAX_SMS
from eprt.ep.nvlink.normal_layout import BlockShape, Chunks, LayoutBuffers, NormalHeap
from eprt.ep.nvlink.rank_mask import RankMask
from eprt.ep.nvlink.structs import RECV, SEND
from eprt.gpu.shapes import known_shape

_BYTES_PER_ITEM = 1024  # of symmetric memory: there are flags for one item per so many bytes


class RowExchange:
    """The exchange of rows among the ranks of a group. All ranks make all calls, in the same order.

    num_bytes: of symmetric memory, equal on all ranks. Up to half of it holds received rows as long as their tensors
        live; during combine it holds the returned rows, T * min(K, R) * (2 H + 4 K) bytes.
    timeout_s: deadline of every wait. A kernel goes on without a late rank, and the next call raises EPTimeoutError, as
        does the host's own wait for counts.
    num_sms: thread blocks; default: chosen.
    size_name: what the caller calls num_bytes, for errors.
    mask: the caller's; default: one of its own.
    """

    def __init__(
        self,
        group: EPGroup,
        num_bytes: int,
        *,
        timeout_s: float,
        num_sms: int | None = None,
        size_name: str = "num_bytes",
        mask: RankMask | None = None,
    ):
        self.group, self._size_name = group, size_name
        self._where = f"[rank {group.rank}/{group.size}]"
        if group.size > MAX_RANKS:
            self._fail(
                f"{group.size} ranks: normal mode has at most {MAX_RANKS} (a lane of a warp for each, and for two "
                "biases); use fewer ranks"
            )
        max_items = max(num_bytes // _BYTES_PER_ITEM, 1024)
        shape = NormalHeap(group.size, MAX_EXPERTS // group.size * group.size, max_items, 1)
        self.kernels = Normal(group, shape, num_bytes, False, num_sms, KernelOptions(timeout_s, mask))
        self._pool = StreamPool(self.kernels.data_begin, num_bytes)
        self._plans = RowsPlans(group, max_items, size_name, timeout_s, self._fail)
        self._recent_rows = 0
        self._most_returned = 0  # bytes
        self._host = self.kernels.host_words(MAX_EXPERTS // group.size)
        self._asked = CallContext(group, timeout_s, 1, 0)

    def dispatch(
        self,
        x_TH: Tensor,
        *,
        num_experts: int,
        scale_TG: Tensor | None = None,
        topk_idx_TK: Tensor | None = None,
        topk_weights_TK: Tensor | None = None,
        is_token_in_rank_TR: Tensor | None = None,
        num_tokens_per_expert_S: Tensor | None = None,
        num_worst_rows: int = 0,
        expert_alignment: int = 1,
        num_sms: int | None = None,
    ) -> ReceivedRows:
        """Sends one row to each rank that a token goes to. ValueError for bad input or rows that do not fit.

        x_TH: contiguous, of any dtype; rows are multiples of 16 bytes, at multiples of 16.
        scale_TG: 4-byte elements, of any strides.
        topk_idx_TK, topk_weights_TK: int32 or int64, -1 masks; fp32. Both or neither.
        is_token_in_rank_TR: bool, instead of topk_idx_TK.
        num_tokens_per_expert_S: int32, with is_token_in_rank_TR; gives rows_of_expert.
        num_worst_rows: a static bound: the host does not wait, and the call may be captured in a graph. 0: the host
            waits for the counts, and the tensors have N rows.
        """
        chunks = Chunks.of(x_TH.shape[0], num_sms or self.kernels.num_sms or MAX_SMS)
        payload = Payload(x_TH, scale_TG)
        routed = topk_idx_TK, topk_weights_TK, is_token_in_rank_TR, num_tokens_per_expert_S
        routing = Routing(x_TH.shape[0], num_experts, chunks, *routed)
        plan = self._plans.plan_for(payload, routing, num_worst_rows, expert_alignment)
        self._raise_failure()  # of an earlier call, which _asked still describes
        self._asked = plan.asked
        buffers, room = plan.layout.new(), num_worst_rows or 2**31 - 1
        ticket = self.kernels.count(
            routing, buffers, self._host, alignment=expert_alignment, num_sms=num_sms, room=room
        )
        self.kernels.prepare_dispatch(
            routing, payload, buffers, plan.top_k, SEND | RECV, fill_tail=num_worst_rows > 0, num_sms=num_sms
        )
        if num_worst_rows:
            return self._receive_bounded(plan, payload, routing, buffers, num_worst_rows)
        return self._receive_counted(plan, payload, routing, buffers, ticket)

    def dispatch_again(
        self, x_TH: Tensor, handle: RowsHandle, *, scale_TG: Tensor | None = None, num_sms: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(x_NH, scale_NG) of another batch with the same layout: without a count and without a host wait."""
        payload = Payload(x_TH, scale_TG)
        self._plans.check_payload(payload)
        if x_TH.shape[0] != handle.num_tokens:
            self._fail(f"dispatch: {x_TH.shape[0]} tokens, but the handle's layout has {handle.num_tokens}")
        self._raise_failure()
        shape = block_shape(handle.num_rows, 0, payload.row_bytes, payload.num_scales)
        self.kernels.prepare_dispatch(
            handle.routing, payload, handle.buffers, 0, SEND | RECV, again=True, num_sms=num_sms
        )
        block, tensors = self._dispatch_into(shape), RowTensors(payload, 0, None)
        tensors.set_memory(self._storage(block), shape, handle.num_rows)
        x_NH, scale_NG = tensors.x_NH, tensors.scale_NG
        return (x_NH, scale_NG) if self._may_stay() else (x_NH.clone(), _clone(scale_NG))

    def combine(
        self,
        y_NH: Tensor,
        handle: RowsHandle,
        *,
        topk_weights_NK: Tensor | None = None,
        biases_TH: Sequence[Tensor] = (),
        num_sms: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(bf16 [T, H]: the fp32 sum of a token's rows in order of rank, rounded once; fp32 [T, K]: the sums of
        topk_weights_NK, if given). A handle may be combined any number of times.

        y_NH: bf16, contiguous, H a multiple of 8; rows in the order in which they were received.
        topk_weights_NK: fp32.
        biases_TH: up to two, bf16, added first.
        """
        self._check_outputs(y_NH, handle, topk_weights_NK, biases_TH)
        self._raise_failure()
        T, hidden = handle.num_tokens, y_NH.shape[1]
        num_weights = 0 if topk_weights_NK is None else topk_weights_NK.shape[1]
        most = T * min(handle.top_k or self.group.size, self.group.size)
        returned = self._take_block(most * returned_stride(hidden, num_weights), f"the outputs of {T} tokens")
        out_TH = torch.empty_like(known_shape((T, hidden), torch.bfloat16))
        out_TK = torch.empty_like(known_shape((T, num_weights), torch.float32)) if num_weights else None
        given, biases = (y_NH, out_TH, handle.buffers, handle.routing, returned.offset), tuple(biases_TH)
        self.kernels.combine_items(*given, weights=topk_weights_NK, out_weights=out_TK, biases=biases, num_sms=num_sms)
        return out_TH, out_TK

    def close(self) -> None:
        """Frees all memory. Collective while all ranks live; does not wait when one has died."""
        self.kernels.close()
        self._host.close()

    # -- inside --

    def _receive_bounded(
        self, plan: RowsPlan, payload: Payload, routing: Routing, buffers: LayoutBuffers, rows: int
    ) -> ReceivedRows:
        shape = plan.block_of(rows)
        block = self._dispatch_into(shape)
        tensors = RowTensors(payload, plan.top_k, buffers)
        tensors.set_memory(self._storage(block), shape, rows)
        self._most_returned = max(self._most_returned, plan.returned_bytes)
        received = tensors.as_received(buffers, routing)
        return received if self._may_stay() else _copied(received)

    def _receive_counted(
        self, plan: RowsPlan, payload: Payload, routing: Routing, buffers: LayoutBuffers, ticket: int
    ) -> ReceivedRows:
        """Launches the prepared dispatch ahead of the counts, then waits for these and cuts the tensors to length."""
        shape = plan.guess_block(self._recent_rows, self.kernels.shape.max_items)
        block = self._pool.try_take_block(shape.num_bytes)
        if block is not None:  # the kernel does nothing if it is too small
            self.kernels.launch_dispatch(block.offset, shape.capacity, tentative=True)
        # Everything that does not need the counts comes before the wait for them.
        tensors = RowTensors(payload, plan.top_k, buffers)
        if block is not None:
            tensors.set_memory(self._storage(block), shape, shape.capacity)
        received = tensors.as_received(buffers, routing)
        self._most_returned = max(self._most_returned, plan.returned_bytes)
        stays = self._may_stay()
        counts = self.kernels.wait_counts(self._host, ticket, routing.num_slots // self.group.size)
        received.rows_of_expert.extend(counts.slot_rows)
        stays &= self._finish_dispatch(tensors, plan, block, shape, counts.rows)
        return received if stays or self._may_stay() else _copied(received)

    def _storage(self, block: Block) -> torch.UntypedStorage:
        """The memory of a block, which lives as long as any tensor on it."""
        return self.kernels.memory.storage(block.offset, block.num_bytes, block)

    def _finish_dispatch(
        self, tensors: RowTensors, plan: RowsPlan, block: Block | None, ahead: BlockShape, rows: int
    ) -> bool:
        """Cuts block and tensors to the rows that came. False if they do not fit: then it has launched again, into
        another block."""
        self._recent_rows = rows
        fits = block is not None and rows <= ahead.capacity
        if block is not None:  # nobody writes beyond the rows, or at all if they do not fit
            self._pool.shrink_block(block, ahead.offsets()["x"] + rows * plan.row_bytes if fits else 0)
        if fits:
            tensors.keep_rows(rows)
        else:
            shape = plan.block_of(rows)
            tensors.set_memory(self._storage(self._dispatch_into(shape)), shape, rows)
        self._raise_failure()  # after the launch, for which peers wait
        return fits

    def _dispatch_into(self, shape: BlockShape) -> Block:
        try:
            block = self._take_block(shape.num_bytes, f"{shape.capacity} received rows")
        except ValueError:
            # Peers wait to learn where their rows go: tell them that there is no room, so that they write nothing.
            self.kernels.launch_dispatch(self.kernels.data_begin, 0)
            raise
        self.kernels.launch_dispatch(block.offset, shape.capacity)
        return block

    def _take_block(self, num_bytes: int, what: str) -> Block:
        """Memory that the current stream may have written from now on."""
        try:
            return self._pool.take_block(num_bytes)
        except PoolFullError as error:
            self._fail(
                f"no room for {what} in symmetric memory: {error}; let go of tensors received earlier, or make "
                f"{self._size_name} larger"
            )

    def _may_stay(self) -> bool:
        """Whether received rows leave half of the memory free, and room for the returned rows of any call so far."""
        return self._pool.fits(max(self._most_returned, self._pool.num_bytes // 2))

    def _check_outputs(
        self, y_NH: Tensor, handle: RowsHandle, weights_NK: Tensor | None, biases_TH: Sequence[Tensor]
    ) -> None:
        hidden = y_NH.shape[-1]
        self._plans.check_rows("combine's rows begin", y_NH, (handle.num_rows, hidden))
        if hidden < 1 or hidden % 8:
            self._fail(f"combine: hidden size {hidden}: must be a multiple of 8 and at least 8")
        if weights_NK is not None:
            if weights_NK.shape[-1] > MAX_TOP_K:
                self._fail(f"combine: {weights_NK.shape[-1]} weights per row; at most {MAX_TOP_K}")
            self._plans.check_tensor(
                "combine's topk_weights", weights_NK, (handle.num_rows, weights_NK.shape[-1]), torch.float32
            )
        if len(biases_TH) > 2:
            self._fail(f"combine: {len(biases_TH)} biases; at most 2")
        for bias_TH in biases_TH:
            self._plans.check_rows("combine's bias begins", bias_TH, (handle.num_tokens, hidden))

    def _raise_failure(self) -> None:
        if error := take_failure(self.kernels.failure.words, self._asked):
            self.kernels.mask[self.group.rank].zero_()  # a rank whose GPU was busy may have masked itself
            raise error

    def _fail(self, message: str) -> NoReturn:
        raise ValueError(f"{self._where} {message}")


def _copied(received: ReceivedRows) -> ReceivedRows:
    handle = replace(received.handle, source_token_N=received.handle.source_token_N.clone())
    idx_NK, weights_NK = _clone(received.topk_idx_NK), _clone(received.topk_weights_NK)
    scale_NG, rows_of_expert = _clone(received.scale_NG), received.rows_of_expert
    return ReceivedRows(received.x_NH.clone(), scale_NG, idx_NK, weights_NK, rows_of_expert, handle)


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
