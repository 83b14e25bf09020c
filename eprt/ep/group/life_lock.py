"""LifeLock: a word of shared memory by which others see at once that a process has been killed.

A process that dies gives its memory back before anything else shows: for one that has loaded torch that takes 50 to 100
ms on a busy machine, until which its sockets stay open and its pidfd says nothing. Before that the kernel marks the
robust mutexes that its threads hold. So each process holds one, and others look at its first word; nobody waits for it.
Knows nothing of ranks.
"""

import ctypes
import platform

import numpy as np

NUM_BYTES = 48  # of a pthread_mutex_t: 40 on x86-64, 48 on ARM
_PROCESS_SHARED, _ROBUST = 1, 1
_OWNER_DIED = 0x4000_0000  # linux/futex.h

_held: set[int] = set()  # addresses


def hold(memory: np.ndarray) -> None:
    """From now on has_died() tells others of the end of the calling thread, which must be the last one of its process.
    memory: uint8 [NUM_BYTES], shared, in which only this process writes."""
    if platform.libc_ver()[0] != "glibc":
        return  # the word lies elsewhere; sockets and pidfds tell a moment later
    libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(16)
    memory[:] = 0
    mutex = ctypes.c_void_p(memory.ctypes.data)
    for call, *arguments in (
        (libc.pthread_mutexattr_init, attributes),
        (libc.pthread_mutexattr_setpshared, attributes, _PROCESS_SHARED),
        (libc.pthread_mutexattr_setrobust, attributes, _ROBUST),
        (libc.pthread_mutex_init, mutex, attributes),
        (libc.pthread_mutex_lock, mutex),
    ):
        if error := call(*arguments):
            raise OSError(error, f"{call.__name__} failed")
    # The kernel looks at it when the process ends, and glibc links held mutexes with each other: it stays mapped.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    _held.add(memory.ctypes.data)


def release(memory: np.ndarray) -> None:
    """Undoes hold(), in the same thread."""
    address = memory.ctypes.data
    if address in _held:
        _held.remove(address)
        ctypes.CDLL(None).pthread_mutex_unlock(ctypes.c_void_p(address))


def died(first_word_R: np.ndarray) -> np.ndarray:
    """bool [R]: whether the process that held each lock has been killed. first_word_R: int32, of each lock."""
    return (first_word_R & _OWNER_DIED) != 0
