"""Memory of the normal mode: fixed fields of the symmetric heap, blocks of rows, a layout's buffers, kernel parameters.

The one place that sizes and names these fields on the Python side; csrc/cuda/normal.cuh mirrors them, and
docs/protocol.md says what each is for. T tokens of this rank, K top-k, R ranks, S slots of all ranks, L of a rank,
B num_buffers, H hidden.
"""

import ctypes
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor

from eprt.ep.nvlink.structs import Fields, align, kernel_context, struct
from eprt.gpu.shapes import known_shape

MAX_CHUNK_TOKENS = 512


@dataclass(frozen=True)
class NormalHeap(Fields):
    """What decides the fixed part of the heap."""

    num_ranks: int
    max_slots: int  # largest S
    max_items: int  # most tokens to or from a rank
    num_buffers: int

    @property
    def width(self) -> int:
        """Words of a count: rows for each slot, tokens for each rank, rounds."""
        return self.max_slots + self.num_ranks + 1

    @cached_property
    def field_bytes(self) -> dict[str, int]:
        sources, flags = 2 * self.num_buffers * self.num_ranks, self.num_buffers * self.max_items * 4
        return {
            "count": sources * self.width * 8,
            "dispatch_place": sources * 16,
            "combine_place": sources * 16,
            "arrived": flags,
            "returned": flags,
        }


@dataclass(frozen=True)
class BlockShape(Fields):
    """A block of received rows."""

    capacity: int  # rows
    top_k: int
    row_bytes: int  # of the values of a row
    num_scales: int  # 4-byte words of a row
    grouped: bool  # rows by expert, entries int32 rows; else one row per item, entries int64 experts

    @property
    def scale_words(self) -> int:
        """Words from one row's scales to the next's."""
        return align(self.num_scales, 4)

    @cached_property
    def field_bytes(self) -> dict[str, int]:
        entries = self.capacity * self.top_k
        return {
            "entry": entries * (4 if self.grouped else 8),
            "weight": entries * 4,
            "token": self.capacity * 4,
            "scale": self.capacity * self.scale_words * 4,
            "x": self.capacity * self.row_bytes,
        }


@dataclass(frozen=True)
class Chunks:
    """How T tokens are cut for counting: count chunks of `tokens` each (the last may be shorter)."""

    tokens: int
    count: int

    @staticmethod
    @lru_cache(maxsize=256)
    def of(num_tokens: int, num_blocks: int) -> "Chunks":
        tokens = min(max(-(-num_tokens // num_blocks), 1), MAX_CHUNK_TOKENS)
        return Chunks(tokens, -(-num_tokens // tokens))

    @staticmethod
    def most(max_tokens: int, num_blocks: int) -> int:
        """The largest count for any number of tokens up to max_tokens."""
        return max(num_blocks, -(-max_tokens // MAX_CHUNK_TOKENS)) + 1


HeapLayout = struct("HeapLayout", "uint64 count dispatch_place combine_place arrived returned")
_LAYOUT = "epoch sent sent_through base chunk_first rank_index slot_index position slot_rows received_ns"
Layout = struct("Layout", f"pointer {_LAYOUT}")


@dataclass(frozen=True)
class LayoutShape:
    """What a count leaves for dispatch and combine: fields as in CUDA's Layout, int32 but received_ns."""

    num_tokens: int
    top_k: int
    num_slots: int
    num_ranks: int
    num_chunks: int

    @cached_property
    def num_words(self) -> int:
        first, shape = self.fields["slot_begin"]  # the last one
        return first + align(prod(shape), 4)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Bytes to the fields that Layout points to, then to slot_begin."""
        return tuple(self.fields[name][0] * 4 for name in (*_LAYOUT.split(), "slot_begin"))

    @cached_property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """(first word, shape)"""
        columns, local = self.num_slots + self.num_ranks, self.num_slots // self.num_ranks
        shapes = {
            "epoch": (2,),
            "sent": (self.num_ranks, self.num_ranks),
            "sent_through": (self.num_ranks, self.num_ranks),
            "base": (columns,),
            "chunk_first": (self.num_chunks, columns),
            "rank_index": (self.num_tokens, self.num_ranks),
            "slot_index": (self.num_tokens, self.top_k),
            "position": (self.num_tokens, self.num_ranks),
            "slot_rows": (local,),
            "received_ns": (2,),
            "slot_begin": (local + 1,),
        }
        fields, words = {}, 0
        for name, shape in shapes.items():
            fields[name] = words, shape
            words += align(prod(shape), 4)
        return fields

    def new(self) -> "LayoutBuffers":
        memory = torch.empty_like(known_shape((self.num_words,), torch.int32))
        begin = memory.data_ptr()
        *pointers, slot_begin = [begin + offset for offset in self.offsets]
        return LayoutBuffers(memory, self, Layout(*pointers), slot_begin)


class LayoutBuffers:
    """Device memory of this rank that a count writes. pointers: for the kernels; slot_begin: of that field. The fields
    as tensors, below, only where somebody asks: they are made for every batch of a prefill."""

    __slots__ = ("memory", "pointers", "shape", "slot_begin")

    def __init__(self, memory: Tensor, shape: LayoutShape, pointers: ctypes.Structure, slot_begin: int):
        self.memory, self.shape, self.pointers, self.slot_begin = memory, shape, pointers, slot_begin

    def field(self, name: str) -> Tensor:
        """One with two dimensions, or one."""
        first, shape = self.shape.fields[name]
        return self.memory.as_strided(shape, (shape[1], 1) if len(shape) == 2 else (1,), first)


Division = struct("Division", "int32 send_blocks send_warps recv_warps")


def context_struct(num_ranks: int) -> type[ctypes.Structure]:
    own = "pointer ticket done taken", "int32 rank num_buffers width max_items"
    return kernel_context(num_ranks, HeapLayout, *own)


def count_struct(context: type[ctypes.Structure]) -> type[ctypes.Structure]:
    return struct(
        "CountParams",
        ("context", context),
        ("layout", Layout),
        "pointer topk_slot in_rank slot_tokens slot_begin host",
        "int32 room num_tokens top_k num_slots slot_bytes alignment grouped chunk_tokens",
        "int32 num_chunks num_rounds",
        "uint32 host_ticket",
    )


def dispatch_struct(context: type[ctypes.Structure]) -> type[ctypes.Structure]:
    return struct(
        "DispatchParams",
        ("context", context),
        ("layout", Layout),
        "pointer x scale topk_slot topk_weight",
        "int64 scale_row_stride scale_group_stride",
        "uint64 block",
        "int32 capacity num_tokens top_k num_slots slot_bytes chunk_tokens x_bytes row_bytes",
        "int32 num_scales cast again fill_tail tentative phases piece_bytes",
        ("division", Division),
    )


def combine_struct(context: type[ctypes.Structure]) -> type[ctypes.Structure]:
    return struct(
        "CombineParams",
        ("context", context),
        ("layout", Layout),
        "pointer y y_weight item_row item_weight item_token topk_slot topk_weight",
        ("bias", ctypes.c_void_p * 2),
        "pointer out out_weight",
        "uint64 block",
        "int32 capacity num_tokens top_k num_slots slot_bytes row_bytes stride phases piece_bytes",
        ("division", Division),
    )
