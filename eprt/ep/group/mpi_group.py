"""MpiGroup: an EPGroup over mpi4py. Windows are MPI shared windows, messages are MPI point to point.

A window larger than the free space of /dev/shm is made of memfds instead.
"""

import os
import sys
import time
from types import TracebackType
from typing import Any

import numpy as np
from mpi4py import MPI

from eprt import env
from eprt.ep.group.group import MAX_CLOSE_S, EPGroup, PendingMessage
from eprt.ep.group.memfd import memfd_window
from eprt.ep.group.window import PAGE, SharedWindow, page_aligned, private_window

_MAX_CANCEL_S = 0.5


class MpiMessage:
    """A PendingMessage over an MPI request."""

    __slots__ = ("_request",)

    def __init__(self, request: MPI.Request):
        self._request = request

    def test(self) -> bool:
        try:
            return self._request.Test()
        except MPI.Exception as error:
            raise ConnectionError(str(error)) from error

    def cancel(self) -> None:
        # A receive that was matched already cannot be cancelled and may be waiting for a dead rank: give it a moment.
        deadline = time.monotonic() + _MAX_CANCEL_S
        try:
            if self._request != MPI.REQUEST_NULL:
                self._request.Cancel()
            while not self._request.Test() and time.monotonic() < deadline:
                time.sleep(0.0005)
        except MPI.Exception:
            pass  # the connection is gone, and with it whoever could write the buffer


class MpiGroup(EPGroup):
    """Ranks of an MPI communicator. Works on a duplicate, so its messages never meet the caller's."""

    def __init__(self, comm: MPI.Intracomm | None = None):
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._windows: list[SharedWindow] = []
        self._closed = False
        self._join(self._comm.rank, self._comm.size)
        self._node_comm = self._split_node()

    def _split_node(self) -> Any:
        """The communicator of this rank's (virtual) node, inside what MPI says shares memory."""
        shared = self._comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        together = set(shared.allgather(self.rank))
        if not set(self.local_ranks) <= together:
            raise RuntimeError(
                f"[rank {self.rank}/{self.size}] ranks {self.local_ranks} see each other's processes, but MPI shares "
                f"memory only among {sorted(together)}; check how mpirun maps ranks to hosts"
            )
        node_comm = shared.Split(self.node, key=self.rank)
        node_comm.Set_errhandler(MPI.ERRORS_RETURN)
        shared.Free()
        return node_comm

    def allgather(self, value: Any) -> list[Any]:
        return self._comm.allgather(value)

    def barrier(self) -> None:
        self._comm.Barrier()

    def shared_window(self, num_bytes: int) -> SharedWindow:
        if len(self.local_ranks) == 1:
            return private_window(num_bytes)
        places = self._node_comm.allgather((num_bytes, _free_shm_bytes()))
        needed = sum(size + PAGE for size, _ in places) + PAGE
        if needed > min(free for _, free in places):
            return memfd_window(num_bytes, self._node_comm.allgather)
        # MPI promises no alignment. A segment lies at the same place of a page in every process, so all cut alike.
        window = MPI.Win.Allocate_shared(num_bytes + PAGE, 1, comm=self._node_comm)
        segments = [page_aligned(_memory(window, i), size) for i, (size, _) in enumerate(places)]
        self._windows.append(SharedWindow(segments, lambda: self._free(window)))
        return self._windows[-1]

    def isend(self, buffer: np.ndarray, peer: int, tag: int) -> PendingMessage:
        return MpiMessage(self._comm.Isend([buffer, MPI.BYTE], peer, tag))

    def irecv(self, buffer: np.ndarray, peer: int, tag: int) -> PendingMessage:
        return MpiMessage(self._comm.Irecv([buffer, MPI.BYTE], peer, tag))

    def _free(self, window: MPI.Win) -> None:
        # Freeing a window is a barrier in MPI and would wait for a dead rank for ever. By now its memory has no name in
        # any file system, so what is not freed here goes with the process.
        if not MPI.Is_finalized() and self._all_present(self._node_comm):
            window.Free()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for window in self._windows:
            window.close()
        self._windows.clear()
        if not MPI.Is_finalized() and self._all_present(self._comm):
            self._node_comm.Free()
            self._comm.Free()
        self._watch.close()

    def _all_present(self, comm: Any) -> bool:
        """Whether all ranks of comm have come here. False when one has died or does not come in time."""
        deadline = time.monotonic() + min(env.get("EPRT_TIMEOUT_S"), MAX_CLOSE_S)
        try:
            arrived = comm.Ibarrier()
            while not arrived.Test():
                if self._watch.lost() or time.monotonic() > deadline:
                    return False
                time.sleep(0.0005)
        except MPI.Exception:
            return False
        return True


def end_job_on_errors() -> None:
    """From now on an error that nobody catches ends all ranks, once it is printed. The process would else wait for the
    others at its exit, inside MPI, and they for it in their next collective call."""
    tell = sys.excepthook

    def tell_and_end(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        tell(kind, error, where)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(1)

    sys.excepthook = tell_and_end


def _free_shm_bytes() -> int:
    """Room where Open MPI keeps its windows; it refuses what exceeds it, though our pages are mostly never touched."""
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return shm.f_bavail * shm.f_frsize


def _memory(window: MPI.Win, index: int) -> np.ndarray:
    memory: Any = window.Shared_query(index)[0]
    return np.frombuffer(memory, dtype=np.uint8)
