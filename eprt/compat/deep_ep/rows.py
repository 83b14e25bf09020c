"""RowExchange: tokens as one row per (token, destination rank), and their way back. What DeepEP's normal mode offers.

The same kernels as the nvlink backend's normal mode (ep/nvlink/normal.py), with another place for the rows: received
rows are not grouped by expert, but ordered by (source rank, token), each once. combine sums what the ranks give back
for a token, unweighted. Launches on the current stream, after whatever was under way where memory is used again.

T tokens of this rank, N rows received, H hidden, K top-k, R ranks, S experts of all ranks, E experts of a rank.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from eprt.compat.deep_ep.pool import Block
from eprt.compat.deep_ep.rows_plan import MAX_EXPERTS, RowsPlan, RowsPlans, block_shape
from eprt.compat.deep_ep.rows_received import ReceivedRows, RowsHandle, RowTensors
from eprt.compat.deep_ep.stream_pool import PoolFullError, StreamPool
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.failure import CallContext, take_failure
from eprt.ep.nvlink.normal import MAX_RANKS, MAX_TOP_K, Normal, Payload, Routing, returned_stride
from eprt.ep.nvlink.normal_grid import MAX_SMS
from eprt.ep.nvlink.normal_layout import BlockShape, Chunks, NormalHeap
from eprt.ep.nvlink.structs import RECV, SEND
from eprt.gpu.shapes import known_shape

_BYTES_PER_ITEM = 1024  # of symmetric memory, for each item that flags are kept for


class RowExchange:
    """Construction and close() are collective, and so is every other call: all ranks, in the same order.

    num_bytes: of symmetric memory, equal on all ranks. Holds received rows for as long as their tensors live, up to
    half of it, and during combine the rows on their way back: T * min(K, R) * (2 H + 4 K) bytes. size_name: what the
    caller calls num_bytes, for errors. num_sms: thread blocks; default: chosen.
    timeout_s: deadline of every wait. Past it a kernel goes on without the late rank; the next call raises
    EPTimeoutError, as does the host's own wait for counts. mask: int32 [R] on the GPU, 1 for ranks that are not waited
    for; default: one of its own.
    """

    def __init__(
        self, group: EPGroup, num_bytes: int, *, timeout_s: float, num_sms: int | None = None, stats: bool = True,
        size_name: str = "num_bytes", mask: Tensor | None = None,
    ):  # fmt: skip
        self.group, self._size_name = group, size_name
        self._where = f"[rank {group.rank}/{group.size}]"
        if group.size > MAX_RANKS:
            self._fail(
                f"{group.size} ranks: normal mode has at most {MAX_RANKS} (a lane of a warp for each, and for two "
                "biases); use fewer ranks"
            )
        max_items = max(num_bytes // _BYTES_PER_ITEM, 1024)
        shape = NormalHeap(group.size, MAX_EXPERTS // group.size * group.size, max_items, 1)
        self.kernels = Normal(
            group, shape, num_bytes, grouped=False, num_sms=num_sms, timeout_s=timeout_s, stats=stats, mask=mask
        )
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
        """One row to each rank a token goes to.

        x_TH: contiguous, of any dtype; a row is a multiple of 16 bytes, at a multiple of 16. scale_TG: 4-byte elements,
        any strides. topk_idx_TK: int32 or int64, -1 masks; topk_weights_TK: fp32 (both or neither).
        is_token_in_rank_TR: bool, instead of topk_idx_TK; then num_tokens_per_expert_S (int32) gives rows_of_expert.
        num_worst_rows: static bound; the host then does not wait (and the call may be captured in a graph). 0: the host
        waits for the counts, and the tensors have N rows.
        Raises ValueError (bad input; rows do not fit), EPTimeoutError.
        """
        chunks = Chunks.of(x_TH.shape[0], num_sms or self.kernels.num_sms or MAX_SMS)
        payload = Payload(x_TH, scale_TG)
        routing = Routing(
            x_TH.shape[0], num_experts, chunks, topk_idx_TK, topk_weights_TK, is_token_in_rank_TR,
            num_tokens_per_expert_S,
        )  # fmt: skip
        plan = self._plans.of(payload, routing, num_worst_rows, expert_alignment)
        self._raise_failure()  # of an earlier call, so before _asked is this one's
        self._asked = plan.asked
        buffers = plan.layout.new()
        ticket = self.kernels.count(
            routing, buffers, self._host, alignment=expert_alignment, num_sms=num_sms,
            room=num_worst_rows or 2**31 - 1,
        )  # fmt: skip
        self.kernels.prepare_dispatch(
            routing, payload, buffers, plan.top_k, SEND | RECV, fill_tail=num_worst_rows > 0, num_sms=num_sms
        )
        if num_worst_rows:
            shape = plan.block(num_worst_rows)
            block: Block | None = self._dispatch_into(shape)
        else:
            shape = plan.guess(self._recent_rows, self.kernels.shape.max_items)
            block = self._dispatch_ahead(shape)
        # Whatever need not know the counts comes before they are waited for.
        tensors = RowTensors(payload, plan.top_k, buffers)
        if block is not None:
            tensors.place(self._storage(block), shape, shape.capacity)
        received = tensors.received(plan.top_k, buffers, routing)
        self._most_returned = max(self._most_returned, plan.returned_bytes)
        stays = self._may_stay()
        if not num_worst_rows:
            counts = self.kernels.wait_counts(self._host, ticket, num_experts // self.group.size)
            received.rows_of_expert.extend(counts.slot_rows)
            stays &= self._settle(tensors, plan, block, shape, counts.rows)
        return received if stays or self._may_stay() else _copied(received)

    def dispatch_again(
        self, x_TH: Tensor, handle: RowsHandle, *, scale_TG: Tensor | None = None, num_sms: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Other tokens of the same layout: x_NH and scale_NG. No counting, no exchange of counts, no host wait."""
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
        tensors.place(self._storage(block), shape, handle.num_rows)
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
        """bf16 [T, H], the fp32 sum of a token's rows over ranks in their order, rounded once; with up to two biases
        (bf16 [T, H]) added first. With topk_weights_NK (fp32) also their sum over ranks, fp32 [T, K].

        y_NH: bf16, contiguous, H a multiple of 8, rows as received. A handle may be combined any number of times.
        """
        self._check_outputs(y_NH, handle, topk_weights_NK, biases_TH)
        self._raise_failure()
        T, hidden = handle.num_tokens, y_NH.shape[1]
        num_weights = 0 if topk_weights_NK is None else topk_weights_NK.shape[1]
        most = T * min(handle.top_k or self.group.size, self.group.size)
        returned = self._take(most * returned_stride(hidden, num_weights), f"the outputs of {T} tokens")
        out_TH = torch.empty_like(known_shape((T, hidden), torch.bfloat16))
        out_TK = torch.empty_like(known_shape((T, num_weights), torch.float32)) if num_weights else None
        self.kernels.combine_items(
            y_NH, out_TH, handle.buffers, handle.routing, returned.offset, weights=topk_weights_NK, out_weights=out_TK,
            biases=tuple(biases_TH), num_sms=num_sms,
        )  # fmt: skip
        return out_TH, out_TK

    def mask_rank(self, rank: int, masked: bool = True) -> None:
        """Goes on without a rank: it is sent nothing, nobody waits for it, its rows add nothing."""
        if not 0 <= rank < self.group.size or rank == self.group.rank:
            self._fail(f"mask_rank({rank}): name another rank of 0..{self.group.size - 1}")
        self.kernels.mask[rank] = int(masked)

    def query_mask(self) -> Tensor:
        """int32 [R] on the GPU: 1 for masked ranks."""
        return self.kernels.mask.clone()

    def close(self) -> None:
        """Frees all memory. Collective while all ranks live; never hangs when some do not."""
        self.kernels.close()
        self._host.close()

    # -- inside --

    def _storage(self, block: Block) -> torch.UntypedStorage:
        """The block's bytes; it lives as long as any tensor of them."""
        return self.kernels.memory.storage(block.offset, block.num_bytes, block)

    def _dispatch_ahead(self, shape: BlockShape) -> Block | None:
        """Launches the dispatch that has been prepared before anyone knows how much comes: it does nothing where the
        block is too small. None, and no launch, where there is no room for a guess."""
        block = self._pool.take_at_once(shape.num_bytes)
        if block is not None:
            self.kernels.launch_dispatch(block.offset, shape.capacity, tentative=True)
        return block

    def _settle(self, tensors: RowTensors, plan: RowsPlan, block: Block | None, ahead: BlockShape, rows: int) -> bool:
        """So many have come. Keeps that much of the block; False where the guess was too low, and it launches again."""
        self._recent_rows = rows
        fits = block is not None and rows <= ahead.capacity
        if block is not None:  # nobody writes beyond the rows, or at all where they do not fit
            self._pool.shrink(block, ahead.offsets()["x"] + rows * plan.row_bytes if fits else 0)
        if fits:
            tensors.keep(rows)
        else:
            shape = plan.block(rows)
            tensors.place(self._storage(self._dispatch_into(shape)), shape, rows)
        self._raise_failure()  # after the launch, which peers wait for
        return fits

    def _dispatch_into(self, shape: BlockShape) -> Block:
        """Launches the dispatch that has been prepared."""
        try:
            block = self._take(shape.num_bytes, f"{shape.capacity} received rows")
        except ValueError:
            # Peers wait to hear where their rows go. No room at all: they are told so, write nothing, and go on.
            self.kernels.launch_dispatch(self.kernels.data_begin, 0)
            raise
        self.kernels.launch_dispatch(block.offset, shape.capacity)
        return block

    def _take(self, num_bytes: int, what: str) -> Block:
        """Memory that the current stream may have written from now on."""
        try:
            return self._pool.take(num_bytes)
        except PoolFullError as error:
            self._fail(
                f"no room for {what} in symmetric memory: {error}; let go of tensors received earlier, or make "
                f"{self._size_name} larger"
            )

    def _may_stay(self) -> bool:
        """Whether what has been received leaves room for the outputs of any dispatch so far, and half of the memory."""
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
            self._plans.check(
                "combine's topk_weights", weights_NK, (handle.num_rows, weights_NK.shape[-1]), torch.float32
            )
        if len(biases_TH) > 2:
            self._fail(f"combine: {len(biases_TH)} biases; at most 2")
        for bias_TH in biases_TH:
            self._plans.check_rows("combine's bias begins", bias_TH, (handle.num_tokens, hidden))

    def _raise_failure(self) -> None:
        if error := take_failure(self.kernels.failure.words, self._asked):
            self.kernels.mask[self.group.rank].zero_()  # if it waited for itself, on a GPU that was busy
            raise error

    def _fail(self, message: str) -> NoReturn:
        raise ValueError(f"{self._where} {message}")


def _copied(received: ReceivedRows) -> ReceivedRows:
    """The same in ordinary memory."""
    handle = replace(received.handle, source_token_N=received.handle.source_token_N.clone())
    return ReceivedRows(
        received.x_NH.clone(), _clone(received.scale_NG), _clone(received.topk_idx_NK),
        _clone(received.topk_weights_NK), received.rows_of_expert, handle,
    )  # fmt: skip


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
