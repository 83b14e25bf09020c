"""Memory of the low-latency mode: the symmetric heap, a dispatch's handle, and the kernels' parameter structs.

The one place that sizes and names these fields on the Python side; csrc/cuda/low_latency.cuh mirrors them, and
docs/protocol.md says what each is for. R ranks, M tokens per rank at most, K top-k, L slots of a rank, B num_buffers.
"""

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_PART_VECTORS = 128  # kPartVectors


def align(value: int, to: int = 128) -> int:
    return -(-value // to) * to


@dataclass(frozen=True)
class HeapShape:
    """What decides the size of the heap. exact: combine sends a row per expert, not one per rank."""

    num_ranks: int
    max_tokens: int
    hidden: int
    top_k: int
    num_local_slots: int
    fp8: bool
    exact: bool
    num_buffers: int

    @property
    def message_bytes(self) -> int:
        """One token on the wire: header, values, scales."""
        header = align(16 + 8 * self.top_k, 16)
        scales = align(-(-self.hidden // 128) * 4, 16) if self.fp8 else 0
        return header + self.hidden * (1 if self.fp8 else 2) + scales

    @property
    def combine_rows(self) -> int:
        """Rows a token gets back at most."""
        return self.top_k if self.exact else min(self.top_k, self.num_ranks)

    @cached_property
    def field_bytes(self) -> dict[str, int]:
        """Of each field, in the order of HeapLayout."""
        sources = 2 * self.num_buffers * self.num_ranks
        rows = self.num_buffers * self.max_tokens * self.combine_rows
        parts = -(-(self.hidden // 8) // _PART_VECTORS)
        return {
            "count": sources * (self.num_local_slots + 1) * 8,
            "message": sources * self.max_tokens * self.message_bytes,
            "row": rows * self.hidden * 2,
            "flag": rows * parts * 4,
        }

    def offsets(self) -> dict[str, int]:
        offset, result = 0, {}
        for name, size in self.field_bytes.items():
            result[name] = offset
            offset += align(size)
        return result

    @property
    def num_bytes(self) -> int:
        return sum(align(size) for size in self.field_bytes.values())


@dataclass(frozen=True)
class HandleBuffers:
    """What a dispatch leaves for its combine; private device memory of a rank, reused every num_buffers dispatches.

    An item is a token received, number source * M + position. epoch [1]; source_items [R]: tokens from each source;
    slot_begin [L + 1]: first rows; item_token [R * M, 2]: token on its source, combine row; item_row [R * M, K]: row or
    -1; item_weight [R * M, K] fp32; item_left [R * M]: rows still to be computed; row_item [rows]: item of each row;
    received_ns [1] int64: when the dispatch was complete. All others int32.
    """

    epoch: Tensor
    source_items: Tensor
    slot_begin: Tensor
    item_token: Tensor
    item_row: Tensor
    item_weight: Tensor
    item_left: Tensor
    row_item: Tensor
    received_ns: Tensor

    @staticmethod
    def new(shape: HeapShape, num_rows: int) -> "HandleBuffers":
        items = shape.num_ranks * shape.max_tokens

        def ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device="cuda")

        return HandleBuffers(
            ints(1), ints(shape.num_ranks), ints(shape.num_local_slots + 1), ints(items, 2), ints(items, shape.top_k),
            torch.zeros(items, shape.top_k, device="cuda"), ints(items), ints(num_rows),
            torch.zeros(1, dtype=torch.int64, device="cuda"),
        )  # fmt: skip


def _struct(name: str, *fields: tuple[str, type]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


def _all(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

HeapLayout = _struct("HeapLayout", *_all(ctypes.c_uint64, "count message row flag"))
Deadline = _struct("Deadline", ("timeout_ns", ctypes.c_uint64), *_all(_POINTER, "mask failure"))
Stats = _struct("Stats", *_all(_POINTER, "wait_ns tokens slot_rows calls compute_ns"))
Handle = _struct(
    "Handle",
    *_all(_POINTER, "epoch source_items slot_begin item_token item_row item_weight item_left row_item received_ns"),
)


def context_struct(num_ranks: int) -> type[ctypes.Structure]:
    return _struct(
        "Context",
        ("peer", ctypes.c_uint64 * num_ranks),
        ("heap", HeapLayout),
        ("deadline", Deadline),
        ("stats", Stats),
        *_all(_POINTER, "ticket stamps"),
        *_all(_INT32, "rank max_tokens num_slots num_buffers"),
    )


def dispatch_struct(context: type[ctypes.Structure]) -> type[ctypes.Structure]:
    return _struct(
        "DispatchParams",
        ("context", context),
        ("handle", Handle),
        *_all(_POINTER, "x topk_slot topk_weight recv_x recv_scale recv_count"),
        *_all(_INT64, "scale_row_stride scale_group_stride"),
        *_all(_INT32, "num_tokens slot_bytes slot_stride alignment ue8m0 phases"),
    )


def combine_struct(context: type[ctypes.Structure]) -> type[ctypes.Structure]:
    return _struct(
        "CombineParams",
        ("context", context),
        ("handle", Handle),
        *_all(_POINTER, "y topk_slot topk_weight out slot_rows signal"),
        *_all(_INT32, "num_tokens slot_bytes phases block_m slot_tiles"),
        ("threshold", ctypes.c_uint32),
    )
