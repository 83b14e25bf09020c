"""The native proxy: finds eprt_wire.so, loads it with ctypes and calls its functions.

Knows the C ABI of csrc/wire/abi.cpp, not what messages mean.
"""

import ctypes
import functools

from eprt.native_library import find_native_library

LIBRARY = "eprt_wire.so"
VERSION = 1
_REMEDY = "run `make build` in the checkout, or install the wheel of this version"


class CShape(ctypes.Structure):
    """struct CShape of csrc/wire/abi.cpp"""

    _fields_ = (
        ("rank", ctypes.c_int64),
        ("num_ranks", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("num_channels", ctypes.c_int64),
        ("ring_capacity", ctypes.c_int64),
        ("arena_bytes", ctypes.c_int64),
        ("silence_ns", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
    )


class CPace(ctypes.Structure):
    """struct CPace of csrc/wire/abi.cpp"""

    _fields_ = (
        ("bytes_per_ns", ctypes.c_double),
        ("latency_ns", ctypes.c_int64),
        ("per_request_ns", ctypes.c_int64),
        ("seed", ctypes.c_int64),
        ("reorder_ns", ctypes.c_int64),
        ("delay_words", ctypes.c_double),
        ("repeat_words", ctypes.c_double),
        ("word_delay_ns", ctypes.c_int64),
    )


@functools.cache
def load_library() -> ctypes.CDLL:
    """ImportError with the remedy if the library is missing or has another version."""
    path = find_native_library(LIBRARY)
    if path is None:
        raise ImportError(f"eprt's native proxy ({LIBRARY}) is not built; {_REMEDY}")
    library = ctypes.CDLL(str(path))
    found = library.eprt_wire_version()
    if found != VERSION:
        raise ImportError(f"{path} has interface version {found}, this Python code needs {VERSION}; {_REMEDY}")
    library.eprt_wire_error.restype = ctypes.c_char_p
    for name in ("open_tcp", "open_paced", "segment_bytes", "send", "receive", "test", "peer_state"):
        getattr(library, f"eprt_wire_{name}").restype = ctypes.c_int64
    return library


def call_wire(name: str, *arguments: int | ctypes.Array | ctypes.Structure) -> int:
    """Calls a function of the library. ConnectionError with its words where it fails. Ints are passed as int64,
    structures and arrays by reference."""
    library = load_library()
    result = getattr(library, f"eprt_wire_{name}")(
        *(ctypes.c_int64(each) if isinstance(each, int) else ctypes.byref(each) for each in arguments)
    )
    if result == -1:
        raise ConnectionError(library.eprt_wire_error().decode())
    return result
