"""MpiGroup: an EPGroup over mpi4py. Windows are MPI shared windows, messages are MPI point to point."""

import time
from typing import Any

import numpy as np
from mpi4py import MPI

from eprt import env
from eprt.ep.group import PAGE, EPGroup, Pending, page_aligned, private_window


class MpiMessage:
    """A Pending over an MPI request."""

    __slots__ = ("_request", "_status", "num_bytes")

    def __init__(self, request: MPI.Request):
        self._request = request
        self._status = MPI.Status()
        self.num_bytes = 0

    def test(self) -> bool:
        try:
            done = self._request.Test(self._status)
        except MPI.Exception as error:
            raise ConnectionError(str(error)) from error
        if done:
            self.num_bytes = self._status.Get_count(MPI.BYTE)
        return done


class MpiGroup(EPGroup):
    """Ranks of an MPI communicator. Works on a duplicate, so its messages never meet the caller's."""

    def __init__(self, comm: MPI.Intracomm | None = None):
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._windows: list[MPI.Win] = []
        self._join(self._comm.rank, self._comm.size)
        self._node_comm = self._split_node()

    def _split_node(self) -> MPI.Comm:
        """The communicator of this rank's (virtual) node, inside what MPI says shares memory."""
        shared = self._comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        together = set(shared.allgather(self.rank))
        if not set(self.local_ranks) <= together:
            raise RuntimeError(
                f"[rank {self.rank}/{self.size}] ranks {self.local_ranks} see each other's processes, but MPI shares "
                f"memory only among {sorted(together)}; check how mpirun maps ranks to hosts"
            )
        node_comm = shared.Split(self.node, key=self.rank)
        shared.Free()
        return node_comm

    def allgather(self, value: Any) -> list[Any]:
        return self._comm.allgather(value)

    def barrier(self) -> None:
        self._comm.Barrier()

    def shared_window(self, num_bytes: int) -> list[np.ndarray]:
        if len(self.local_ranks) == 1:
            return private_window(num_bytes)
        # MPI promises no alignment. A segment lies at the same place of a page in every process, so all cut alike.
        window = MPI.Win.Allocate_shared(num_bytes + PAGE, 1, comm=self._node_comm)
        self._windows.append(window)
        sizes = self._node_comm.allgather(num_bytes)
        raw = [np.frombuffer(memoryview(window.Shared_query(i)[0]), dtype=np.uint8) for i in range(len(sizes))]
        return [page_aligned(segment, size) for segment, size in zip(raw, sizes)]

    def isend(self, buffer: np.ndarray, peer: int, tag: int) -> Pending:
        return MpiMessage(self._comm.Isend([buffer, MPI.BYTE], peer, tag))

    def irecv(self, buffer: np.ndarray, peer: int, tag: int) -> Pending:
        return MpiMessage(self._comm.Irecv([buffer, MPI.BYTE], peer, tag))

    def close(self) -> None:
        # Freeing a window is a barrier in MPI and would wait for a dead rank for ever. The memory has no name in any
        # file system by now, so what is not freed here goes with the process.
        if self._node_comm != MPI.COMM_NULL and not MPI.Is_finalized() and self._all_closing():
            for window in self._windows:
                window.Free()
            self._node_comm.Free()
            self._comm.Free()
        self._windows.clear()
        self._watch.close()

    def _all_closing(self) -> bool:
        """Whether every rank has come to close() before the deadline."""
        deadline = time.monotonic() + env.get("EPRT_TIMEOUT_S")
        try:
            arrived = self._comm.Ibarrier()
            while not arrived.Test():
                if self._watch.lost() or time.monotonic() > deadline:
                    return False
                time.sleep(0.0005)
        except MPI.Exception:
            return False
        return True
