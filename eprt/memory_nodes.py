"""NUMA nodes of memory, as Linux sees them: from which ones a thread takes pages, and on which ones a process's pages
lie. Standard library only."""

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

# linux/mempolicy.h
_DEFAULT, _PREFERRED, _INTERLEAVE = 0, 1, 3
# Numbers of set_mempolicy and get_mempolicy; glibc wraps neither.
_SYSCALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
_MOST_NODES = 1024  # that a kernel can be built for; get_mempolicy refuses to answer into fewer bits
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def prefer_nodes(nodes: Sequence[int]) -> None:
    """From now on this thread, and those that it starts, take new pages from the one node, or from several in turn.
    Preferred, not bound: a full node must not kill a process while its neighbour has memory. OSError where the kernel
    refuses, as it does in containers by default."""
    words = (ctypes.c_ulong * (max(nodes) // _WORD_BITS + 1))()
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    mode = _PREFERRED if len(nodes) == 1 else _INTERLEAVE
    # The kernel reads maxnode - 1 bits.
    _call(0, ctypes.c_int(mode), words, ctypes.c_ulong(len(words) * _WORD_BITS + 1))


def preferred_nodes() -> tuple[int, ...]:
    """The nodes that prefer_nodes() or numactl has given this thread, () where it has none. OSError like there."""
    mode, words = ctypes.c_int(_DEFAULT), (ctypes.c_ulong * (_MOST_NODES // _WORD_BITS))()
    _call(1, ctypes.byref(mode), words, ctypes.c_ulong(_MOST_NODES + 1), None, ctypes.c_ulong(0))
    return tuple(node for node in range(_MOST_NODES) if words[node // _WORD_BITS] >> node % _WORD_BITS & 1)


def own_memory(numa_maps: str | Path = "/proc/self/numa_maps") -> dict[int, int]:
    """Bytes on each node of what this process has to itself: anonymous memory, so weights, but neither files nor what
    it shares with others. {} where the kernel does not tell."""
    try:
        lines = Path(numa_maps).read_text().splitlines()
    except OSError:
        return {}
    found: dict[int, int] = {}
    for line in lines:
        # 7f1c00000000 prefer:0 anon=512 dirty=512 N0=500 N1=12 kernelpagesize_kB=4
        values = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "anon" not in values or "file" in values:
            continue
        page_bytes = int(values.get("kernelpagesize_kB", 4)) << 10
        for name, value in values.items():
            if name[0] == "N" and name[1:].isdigit():
                found[int(name[1:])] = found.get(int(name[1:]), 0) + int(value) * page_bytes
    return found


def _call(which: int, *arguments) -> None:
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None:
        raise OSError(f"unknown on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(numbers[which]), *arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
