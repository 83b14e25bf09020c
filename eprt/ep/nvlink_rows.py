"""RowExchange: tokens as one row per (token, destination rank), and their way back. What DeepEP's normal mode offers.

The same kernels as the nvlink backend's normal mode (nvlink_normal.py), with another place for the rows: received rows
are not grouped by expert, but ordered by (source rank, token), each once. combine sums what the ranks give back for a
token, unweighted. Launches on the current stream, after whatever was under way where memory is used again.

T tokens of this rank, N rows received, H hidden, K top-k, R ranks, S experts of all ranks, E experts of a rank.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NoReturn

import torch
from torch import Tensor

from eprt.ep.group import EPGroup
from eprt.ep.nvlink_failure import Asked, take_failure
from eprt.ep.nvlink_low_latency import RECV, SEND
from eprt.ep.nvlink_normal import (
    MAX_RANKS,
    MAX_SCALES,
    MAX_SLOTS,
    MAX_TOP_K,
    Normal,
    Payload,
    Routing,
    returned_stride,
)  # fmt: skip
from eprt.ep.nvlink_normal_grid import MAX_SMS
from eprt.ep.nvlink_normal_layout import BlockShape, Chunks, HeapShape, LayoutBuffers
from eprt.gpu.pool import Block, Pool, PoolFullError

_MAX_EXPERTS = 4096
_BYTES_PER_ITEM = 1024  # of symmetric memory, for each item that flags are kept for


@dataclass(frozen=True)
class RowsHandle:
    """A layout: what combine, and another dispatch of the same layout, need. All tensors are on the GPU.

    num_tokens: T. num_rows: rows of the received tensors: N, or the static bound. top_k: 0 without topk_idx.
    num_experts: S.
    sent_RR: int32 [R, R], tokens that rank i sends to rank j; equal on all ranks. Its cumsum(0) is DeepEP's
        rank_prefix_matrix.
    position_TR: int32 [T, R], the token's place among those from here to that rank, or -1 (its sign is DeepEP's
        is_token_in_rank).
    source_token_N: int32 [num_rows], the token's index on its source rank; defined for the first N rows.
    buffers, routing: for the kernels.
    """

    num_tokens: int
    num_rows: int
    top_k: int
    num_experts: int
    sent_RR: Tensor
    position_TR: Tensor
    source_token_N: Tensor
    buffers: LayoutBuffers
    routing: Routing


@dataclass(frozen=True)
class ReceivedRows:
    """What came. The tensors lie in symmetric memory and keep it for as long as any of them (or a view) lives; drop
    them on the stream that used them last. When that memory runs low they are ordinary copies.

    x_NH: the payload, as it was sent. scale_NG: fp32 [N, G], or None.

    topk_idx_NK: int64, experts counted from this rank's first, -1 for those of other ranks; None without topk_idx.
    topk_weights_NK: fp32, 0 where topk_idx is -1.
    rows_of_expert: rows for each expert of this rank, each rounded up to expert_alignment; [] with a static bound.
    With a static bound the tensors have so many rows; beyond the received ones topk_idx is -1, all else undefined.
    """

    x_NH: Tensor
    scale_NG: Tensor | None
    topk_idx_NK: Tensor | None
    topk_weights_NK: Tensor | None
    rows_of_expert: list[int]
    handle: RowsHandle


class RowExchange:
    """Construction and close() are collective, and so is every other call: all ranks, in the same order.

    num_bytes: of symmetric memory, equal on all ranks. Holds received rows for as long as their tensors live, up to
    half of it, and during combine the rows on their way back: T * min(K, R) * (2 H + 4 K) bytes. size_name: what the
    caller calls num_bytes, for errors. num_sms: thread blocks; default: chosen.
    timeout_s: deadline of every wait. Past it a kernel goes on without the late rank; the next call raises
    EPTimeoutError, as does the host's own wait for counts.
    """

    def __init__(
        self, group: EPGroup, num_bytes: int, *, timeout_s: float, num_sms: int | None = None, stats: bool = True,
        size_name: str = "num_bytes",
    ):  # fmt: skip
        self.group, self._size_name = group, size_name
        self._where = f"[rank {group.rank}/{group.size}]"
        if group.size > MAX_RANKS:
            self._fail(
                f"{group.size} ranks: normal mode has at most {MAX_RANKS} (a lane of a warp for each, and for two "
                "biases); use fewer ranks"
            )
        max_items = max(num_bytes // _BYTES_PER_ITEM, 1024)
        shape = HeapShape(group.size, _MAX_EXPERTS // group.size * group.size, max_items, 1)
        self.kernels = Normal(group, shape, num_bytes, grouped=False, num_sms=num_sms, timeout_s=timeout_s, stats=stats)
        self._pool = Pool(self.kernels.data_begin, num_bytes, _mark)
        self._most_returned = 0  # bytes
        self._host = self.kernels.host_words(_MAX_EXPERTS // group.size)
        self._asked = Asked(group, timeout_s, 1, 0)

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
        payload = self._payload(x_TH, scale_TG)
        num_blocks = num_sms or self.kernels.num_sms or MAX_SMS
        T, R = x_TH.shape[0], self.group.size
        routing = Routing(
            T, num_experts, Chunks.of(T, num_blocks), topk_idx_TK, topk_weights_TK, is_token_in_rank_TR,
            num_tokens_per_expert_S,
        )  # fmt: skip
        self._check_routing(routing, expert_alignment)
        self._asked = Asked(
            self.group, self.kernels.timeout_s, max(routing.top_k, 1), num_experts, "dispatch", "topk_idx"
        )
        self._raise_failure()
        buffers = LayoutBuffers.new(T, routing.top_k, num_experts, R, routing.chunks.count)
        ticket = self.kernels.count(routing, buffers, self._host, num_sms=num_sms)
        # All that is known before the counts is done while the GPU finds them.
        self.kernels.prepare_dispatch(
            routing, payload, buffers, routing.top_k, SEND | RECV, fill_tail=num_worst_rows > 0, num_sms=num_sms
        )
        capacity, in_expert = num_worst_rows, ()
        if not num_worst_rows:
            counts = self.kernels.wait_counts(self._host, ticket, num_experts // R)
            self._raise_failure()
            capacity, in_expert = counts.rows, counts.slot_rows
        if capacity > self.kernels.shape.max_items:
            self._fail(f"dispatch: {capacity} rows are more than {self._size_name} allows for; make it larger")
        shape = BlockShape(capacity, routing.top_k, payload.row_bytes, payload.num_scales, grouped=False)
        block = self._dispatch_into(shape)
        rows_of_expert = [-(-rows // expert_alignment) * expert_alignment for rows in in_expert]
        received = self._received(payload, routing, buffers, block, shape, rows_of_expert)
        returned = T * min(routing.top_k or R, R) * returned_stride(x_TH.shape[1], routing.top_k)
        return self._kept(received, returned)

    def dispatch_again(
        self, x_TH: Tensor, handle: RowsHandle, *, scale_TG: Tensor | None = None, num_sms: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Other tokens of the same layout: x_NH and scale_NG. No counting, no exchange of counts, no host wait."""
        payload = self._payload(x_TH, scale_TG)
        if x_TH.shape[0] != handle.num_tokens:
            self._fail(f"dispatch: {x_TH.shape[0]} tokens, but the handle's layout has {handle.num_tokens}")
        self._raise_failure()
        shape = BlockShape(handle.num_rows, 0, payload.row_bytes, payload.num_scales, grouped=False)
        self.kernels.prepare_dispatch(
            handle.routing, payload, handle.buffers, 0, SEND | RECV, again=True, num_sms=num_sms
        )
        x_NH, scale_NG = _rows(self._memory(self._dispatch_into(shape), shape), payload, shape)
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
        out_TH = torch.empty(T, hidden, dtype=torch.bfloat16, device="cuda")
        out_TK = torch.empty(T, num_weights, dtype=torch.float32, device="cuda") if num_weights else None
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

    def _received(
        self, payload: Payload, routing: Routing, buffers: LayoutBuffers, block: Block, shape: BlockShape,
        rows_of_expert: list[int],
    ) -> ReceivedRows:  # fmt: skip
        rows, K, offsets = shape.capacity, shape.top_k, shape.offsets()
        memory = self._memory(block, shape)
        token_N = _field(memory, offsets["token"], (rows,), torch.int32)
        idx_NK = weights_NK = None
        if K:
            idx_NK = _field(memory, offsets["entry"], (rows, K), torch.int64)
            weights_NK = _field(memory, offsets["weight"], (rows, K), torch.float32)
        handle = RowsHandle(
            routing.num_tokens, rows, K, routing.num_slots, buffers.field("sent"), buffers.field("position"), token_N,
            buffers, routing,
        )  # fmt: skip
        return ReceivedRows(*_rows(memory, payload, shape), idx_NK, weights_NK, rows_of_expert, handle)

    def _memory(self, block: Block, shape: BlockShape) -> Tensor:
        """The block's bytes; it lives as long as any view of them. All tensors are views of this one: making one over
        foreign memory costs the host tens of microseconds."""
        return self.kernels.memory.view(block.offset, (shape.num_bytes,), torch.uint8, block)

    def _dispatch_into(self, shape: BlockShape) -> Block:
        """Launches the dispatch that has been prepared."""
        try:
            block = self._take(shape.num_bytes, f"{shape.capacity} received rows")
        except ValueError:
            # Peers wait to hear where their rows go. No room at all: they are told so and go on.
            nowhere = replace(shape, capacity=0)
            self.kernels.launch_dispatch(self._take(nowhere.num_bytes, "nothing").offset, 0)
            raise
        self.kernels.launch_dispatch(block.offset, shape.capacity)
        return block

    def _take(self, num_bytes: int, what: str) -> Block:
        """Memory that the current stream may have written from now on."""
        graph = torch.cuda.is_current_stream_capturing()
        try:
            if not self._pool.fits(num_bytes):
                gc.collect()  # tensors in reference cycles keep their memory until then
            block = self._pool.take(num_bytes, graph)
        except PoolFullError as error:
            self._fail(
                f"no room for {what} in symmetric memory: {error}; let go of tensors received earlier, or make "
                f"{self._size_name} larger"
            )
        if block.marks and not graph:  # before a capture all work is done
            stream = torch.cuda.current_stream()
            for user, event in block.marks:
                if user != stream:
                    stream.wait_event(event)
        return block

    def _may_stay(self) -> bool:
        """Whether what has been received leaves room for the outputs of any dispatch so far, and half of the memory."""
        return self._pool.fits(max(self._most_returned, self._pool.num_bytes // 2))

    def _kept(self, received: ReceivedRows, returned_bytes: int) -> ReceivedRows:
        """The same; as copies when outputs would else have no room."""
        self._most_returned = max(self._most_returned, returned_bytes)
        if self._may_stay():
            return received
        handle = replace(received.handle, source_token_N=received.handle.source_token_N.clone())
        return ReceivedRows(
            received.x_NH.clone(), _clone(received.scale_NG), _clone(received.topk_idx_NK),
            _clone(received.topk_weights_NK), received.rows_of_expert, handle,
        )  # fmt: skip

    def _payload(self, x_TH: Tensor, scale_TG: Tensor | None) -> Payload:
        if x_TH.dim() != 2 or not x_TH.is_contiguous() or not x_TH.is_cuda:
            self._fail(f"dispatch: x is {tuple(x_TH.shape)} on {x_TH.device}; it must be contiguous [T, H] on the GPU")
        row_bytes = x_TH.shape[1] * x_TH.element_size()
        if row_bytes % 16 or x_TH.data_ptr() % 16:
            self._fail(f"dispatch: a row of x has {row_bytes} B; rows must be multiples of 16 B, at multiples of 16")
        if scale_TG is not None:
            fits = scale_TG.dim() == 2 and scale_TG.shape[0] == x_TH.shape[0] and scale_TG.element_size() == 4
            if not fits or not scale_TG.is_cuda or scale_TG.shape[1] > MAX_SCALES:
                self._fail(
                    f"dispatch: scales are {scale_TG.dtype} {tuple(scale_TG.shape)} on {scale_TG.device}; expected "
                    f"4-byte elements [{x_TH.shape[0]}, up to {MAX_SCALES}] on the GPU"
                )
        return Payload(x_TH, scale_TG)

    def _check_routing(self, routing: Routing, alignment: int) -> None:
        T, S, R = routing.num_tokens, routing.num_slots, self.group.size
        if S < 1 or S % R or min(_MAX_EXPERTS, MAX_SLOTS) < S:
            self._fail(f"dispatch: num_experts={S}: must be a multiple of the {R} ranks, at most {_MAX_EXPERTS}")
        if alignment < 1:
            self._fail(f"dispatch: expert_alignment={alignment}: must be at least 1")
        if self.kernels.shape.max_items < T * R:
            self._fail(f"dispatch: {T} tokens for {R} ranks are more than {self._size_name} allows for; make it larger")
        given = (routing.topk_slot is None, routing.topk_weight is None, routing.in_rank is not None)
        if given not in ((False, False, False), (True, True, True)):
            self._fail("dispatch: give topk_idx and topk_weights, or is_token_in_rank, and not both")
        if routing.topk_slot is not None and routing.topk_weight is not None:
            K = routing.top_k
            if not 1 <= K <= MAX_TOP_K:
                self._fail(f"dispatch: top-k is {K}: must be in 1..{MAX_TOP_K}")
            self._check("topk_idx", routing.topk_slot, (T, K), torch.int32, torch.int64)
            self._check("topk_weights", routing.topk_weight, (T, K), torch.float32)
        if routing.in_rank is not None:
            self._check("is_token_in_rank", routing.in_rank, (T, R), torch.bool)
            if routing.slot_tokens is None:
                self._fail("dispatch: is_token_in_rank needs num_tokens_per_expert")
            self._check("num_tokens_per_expert", routing.slot_tokens, (S,), torch.int32)

    def _check_outputs(
        self, y_NH: Tensor, handle: RowsHandle, weights_NK: Tensor | None, biases_TH: Sequence[Tensor]
    ) -> None:
        hidden = y_NH.shape[-1]
        self._check("combine's rows", y_NH, (handle.num_rows, hidden), torch.bfloat16)
        if hidden % 8:
            self._fail(f"combine: hidden size {hidden} is no multiple of 8")
        if weights_NK is not None:
            if weights_NK.shape[-1] > MAX_TOP_K:
                self._fail(f"combine: {weights_NK.shape[-1]} weights per row; at most {MAX_TOP_K}")
            self._check("combine's topk_weights", weights_NK, (handle.num_rows, weights_NK.shape[-1]), torch.float32)
        if len(biases_TH) > 2:
            self._fail(f"combine: {len(biases_TH)} biases; at most 2")
        for bias_TH in biases_TH:
            self._check("combine's bias", bias_TH, (handle.num_tokens, hidden), torch.bfloat16)

    def _check(self, what: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
        if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_cuda or not tensor.is_contiguous():
            names = " or ".join(str(dtype) for dtype in dtypes)
            self._fail(
                f"{what}: {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected contiguous {names} "
                f"{shape} on the GPU"
            )

    def _raise_failure(self) -> None:
        if error := take_failure(self.kernels.failure.words, self._asked):
            raise error

    def _fail(self, message: str) -> NoReturn:
        raise ValueError(f"{self._where} {message}")


def _field(memory: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _rows(memory: Tensor, payload: Payload, shape: BlockShape) -> tuple[Tensor, Tensor | None]:
    """Values and scales of a block of rows."""
    offsets, rows = shape.offsets(), shape.capacity
    x_NH = _field(memory, offsets["x"], (rows, payload.x.shape[1]), payload.x.dtype)
    if payload.scale is None:
        return x_NH, None
    scale_NG = _field(memory, offsets["scale"], (rows, shape.scale_words), payload.scale.dtype)
    return x_NH, scale_NG[:, : shape.num_scales]


def _mark() -> tuple[torch.cuda.Stream, torch.cuda.Event] | None:
    """What the current stream has been given so far: memory that goes back now may be in use by it."""
    if torch.cuda.is_current_stream_capturing():
        return None
    stream, event = torch.cuda.current_stream(), torch.cuda.Event()
    event.record(stream)
    return stream, event


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
