"""Memory that Python and CUDA share: aligned fields, ctypes structs, and the parts that both modes' kernels have."""

import ctypes
from functools import cached_property


def align(value: int, to: int = 128) -> int:
    return -(-value // to) * to


class Fields:
    """Memory in which aligned fields follow one another."""

    field_bytes: dict[str, int]  # of each field, in their order

    def offsets(self) -> dict[str, int]:
        return self._placed[0]

    @property
    def num_bytes(self) -> int:
        return self._placed[1]

    @cached_property
    def _placed(self) -> tuple[dict[str, int], int]:
        offset, offsets = 0, {}
        for name, size in self.field_bytes.items():
            offsets[name] = offset
            offset += align(size)
        return offsets, offset


def struct(name: str, *fields: tuple[str, type]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


def fields_of_type(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


SEND, RECV = 1, 2  # phases of a launch: kSend, kRecv
POINTER, INT32, INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
UINT32, UINT64 = ctypes.c_uint32, ctypes.c_uint64

Deadline = struct("Deadline", ("timeout_ns", UINT64), *fields_of_type(POINTER, "mask failure"))
Stats = struct("Stats", *fields_of_type(POINTER, "wait_ns tokens calls compute_ns blocked_ns"))


def deadline_ns(timeout_s: float) -> int:
    """As the kernels count: of what 64 bits hold at most, 292 years, so also of infinity."""
    return int(min(timeout_s * 1e9, 2.0**63))
