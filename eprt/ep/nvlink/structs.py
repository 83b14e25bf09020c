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


SEND, RECV = 1, 2  # phases of a launch: kSend, kRecv
_SCALARS = {
    "pointer": ctypes.c_void_p,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "uint32": ctypes.c_uint32,
    "uint64": ctypes.c_uint64,
}


def struct(name: str, *fields: str | tuple[str, type]) -> type[ctypes.Structure]:
    """fields: (name, type), or "int32 name name ..." for some that are scalars of one type."""
    members: list[tuple[str, type]] = []
    for field in fields:
        if isinstance(field, str):
            kind, *names = field.split()
            members += [(each, _SCALARS[kind]) for each in names]
        else:
            members.append(field)
    return type(name, (ctypes.Structure,), {"_fields_": members})


Deadline = struct("Deadline", "uint64 timeout_ns", "pointer mask told failure waiting")
Stats = struct("Stats", "pointer wait_ns tokens calls compute_ns blocked_ns")


def kernel_context(
    num_ranks: int, heap: type[ctypes.Structure], *own: str | tuple[str, type]
) -> type[ctypes.Structure]:
    """struct Context: what both modes have, then a mode's own fields."""
    shared = ("peer", ctypes.c_uint64 * num_ranks), ("heap", heap), ("deadline", Deadline), ("stats", Stats)
    return struct("Context", *shared, *own)


def deadline_ns(timeout_s: float) -> int:
    """As the kernels count: of what 64 bits hold at most, 292 years, so also of infinity."""
    return int(min(timeout_s * 1e9, 2.0**63))
