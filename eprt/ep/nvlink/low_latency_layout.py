"""Memory of the low-latency mode: the symmetric heap, a dispatch's handle, and the kernels' parameter structs.

The one place that sizes and names these fields on the Python side; csrc/cuda/low_latency.cuh mirrors them, and
docs/protocol.md says what each is for. R ranks, M tokens per rank at most, K top-k, L slots of a rank, B num_buffers.
"""

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eprt.ep.nvlink.structs import Fields, align, kernel_context, struct

_LINE_BYTES, _LINE_VECTORS, _HEADER_ENTRIES = 128, 7, 14  # kLineBytes, kLineVectors, kHeaderEntries
_FOUR_BYTES, _FOUR_VECTORS = 512, 31  # kWarpLineBytes, kFourVectors


@dataclass(frozen=True)
class LowLatencyHeap(Fields):
    """What decides the size of the heap."""

    num_ranks: int
    max_tokens: int
    hidden: int
    top_k: int
    num_local_slots: int
    payload: str  # that dispatch sends: "fp8", "bf16", or "either", call by call
    exact: bool  # combine sends a row per expert, not one per rank
    num_buffers: int
    late_weights: bool = False  # combine may bring the gate weights instead of dispatch; unused with exact
    # Ranks of each node, in order, where ranks are on several nodes: between nodes there is a wire (WireLayout).
    node_ranks: int | None = None
    layered: bool = False  # a token crosses once to each other node, not to each rank there

    @property
    def payload_bytes(self) -> int:
        """Of one token's values and scales."""
        bf16, fp8 = self.hidden * 2, self.hidden + -(-self.hidden // 128) * 4
        return fp8 if self.payload == "fp8" else bf16

    @property
    def message_bytes(self) -> int:
        """From one token on the wire to the next: lines of the header, then of the values."""
        header = -(-self.top_k // _HEADER_ENTRIES)
        values = -(-self.hidden // (16 if self.payload == "fp8" else 8) // _LINE_VECTORS)
        return (header + values) * _LINE_BYTES

    @property
    def combine_rows(self) -> int:
        """Rows a token gets back at most, where they are summed."""
        summed_ranks = self.node_ranks if self.node_ranks and self.layered else self.num_ranks
        return self.top_k if self.exact or self.late_weights else min(self.top_k, summed_ranks)

    @property
    def outbox_rows(self) -> int:
        """Rows that the outbox has for a token of another node's rank."""
        return self.top_k if self.exact and not self.layered else 1

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // (self.node_ranks or self.num_ranks)

    @property
    def count_words(self) -> int:
        """What a source tells each rank: rows of its slots, which tokens come; with `layered` also which come to its
        node, and who hands them on."""
        bits = -(-self.max_tokens // 32)
        return self.num_local_slots + bits + (bits + 1 if self.layered else 0)

    @property
    def row_bytes(self) -> int:
        return -(-(self.hidden // 8) // _FOUR_VECTORS) * _FOUR_BYTES

    @cached_property
    def field_bytes(self) -> dict[str, int]:
        """Of each field, in the order of HeapLayout, then of WireLayout."""
        sources = 2 * self.num_buffers * self.num_ranks
        rows = 2 * self.num_buffers * self.max_tokens * self.combine_rows
        fields = {
            "count": sources * self.count_words * 8,
            "message": sources * self.max_tokens * self.message_bytes,
            "row": rows * self.row_bytes,
            "weight": sources * align(self.max_tokens * self.top_k, 2) * 8 if self.late_weights else 0,
            "begun": self.num_ranks * 4,
        }
        return fields if self.node_ranks is None else fields | self._wire_bytes(fields, sources, rows)

    def _wire_bytes(self, fields: dict[str, int], sources: int, rows: int) -> dict[str, int]:
        sets, tokens = 2 * self.num_buffers, self.max_tokens
        sums = sets * tokens * self.num_nodes if self.layered else 0
        in_layers = int(self.layered)
        return {
            "counts": fields["count"],
            "messages": sums * self.message_bytes if self.layered else fields["message"],
            "rows": sources * self.max_tokens * self.outbox_rows * self.row_bytes,
            "counts_word": sources * 8,
            "message_word": sources * self.max_tokens * 8,
            "row_word": (sums if self.layered else rows) * 8,
            "begun_word": sources * 8,
            "counts_done": self.num_ranks * 8,
            "message_done": self.max_tokens * 8,
            "rows_done": self.num_ranks * self.max_tokens * 8,
            "inbox": in_layers * fields["message"],
            "shares": in_layers * sources * tokens * self.combine_rows * self.row_bytes,
            "sums": sums * self.row_bytes,
            "handing": in_layers * self.num_ranks * 4,
            "given_up": in_layers * self.num_ranks * 4,
            "agreed": in_layers * sets * 8,
            "crossed": 2 * 8,
        }

    def layout(self, kind: type[ctypes.Structure]) -> ctypes.Structure:
        """kind: HeapLayout or WireLayout."""
        return kind(**{field[0]: self.offsets()[field[0]] for field in kind._fields_})


@dataclass(frozen=True)
class HandleBuffers:
    """What a dispatch leaves for its combine: private device memory of a rank."""

    memory: Tensor
    pointers: ctypes.Structure  # Handle: where each field begins

    @staticmethod
    def new(shape: LowLatencyHeap, num_rows: int) -> "HandleBuffers":
        """For dispatches that bring num_rows rows at most."""
        items, top_k = shape.num_ranks * shape.max_tokens, shape.top_k
        # In 4-byte words; int32 unless noted. An item is a token received, number source * M + position.
        words = {
            "received_ns": 2,  # int64 [1]: when the dispatch was complete
            "epoch": 2,  # [2]: of the dispatch, of its last combine
            "source_items": shape.num_ranks,  # [R]: tokens from each source
            "slot_begin": shape.num_local_slots + 1,  # [L + 1]: first row of each slot
            "item_token": items * 2,  # [R * M, 2]: token on its source, row of its combine
            "item_row": items * top_k,  # [R * M, K]: row or -1
            "item_weight": items * top_k,  # fp32 [R * M, K]
            "item_left": items,  # [R * M]: rows not computed yet
            "row_item": num_rows,  # [rows]: item of each row
        }
        memory = torch.zeros(sum(words.values()), dtype=torch.int32, device="cuda")
        pointer, pointers = memory.data_ptr(), {}
        for name, length in words.items():
            pointers[name] = pointer
            pointer += length * 4
        return HandleBuffers(memory, Handle(**pointers))


HeapLayout = struct("HeapLayout", "uint64 count message row weight begun")
WireLayout = struct(
    "WireLayout",
    "uint64 counts messages rows counts_word message_word row_word begun_word counts_done message_done rows_done",
    "uint64 inbox shares sums handing given_up agreed crossed",
)
Handle = struct(
    "Handle", "pointer epoch source_items slot_begin item_token item_row item_weight item_left row_item received_ns"
)


def context_struct(num_ranks: int, wired: bool = False) -> type[ctypes.Structure]:
    """wired: of kernels between nodes."""
    own = "pointer ticket stamps", "int32 rank max_tokens num_slots num_buffers"
    return kernel_context(num_ranks, HeapLayout, *own, *((("wire", WireLayout),) if wired else ()))


def dispatch_struct(context: type[ctypes.Structure]) -> type[ctypes.Structure]:
    return struct(
        "DispatchParams",
        ("context", context),
        ("handle", Handle),
        "pointer x topk_slot topk_weight",
        "pointer recv_x recv_scale recv_count recv_token recv_range recv_total wait_cost",
        "int64 scale_slot_stride scale_row_stride scale_group_stride",
        "int32 num_tokens slot_bytes slot_stride alignment scale_format phases",
    )


def combine_struct(context: type[ctypes.Structure]) -> type[ctypes.Structure]:
    return struct(
        "CombineParams",
        ("context", context),
        ("handle", Handle),
        "pointer y topk_slot topk_weight out slot_rows signal wait_cost",
        "int32 num_tokens slot_bytes phases block_m slot_tiles",
        "uint32 threshold",
    )
