"""HostGroup: an EPGroup of processes that eprt's own launcher started on one host. No MPI, no messages between nodes.

Set-up calls go over the board (host_board.py), and windows lie on it. A process that joins a running group repeats the
set-up calls of its predecessor: it finds what the others said then, and waits for nobody.
"""

import os
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from eprt import env
from eprt.ep.errors import EPTimeoutError, RankLostError
from eprt.ep.group.current_wait import CurrentWait
from eprt.ep.group.group import EPGroup, PendingMessage
from eprt.ep.group.host_board import HostBoard
from eprt.ep.group.liveness import PeerWatch
from eprt.ep.group.window import AdjacentMemory, SharedWindow, private_window
from eprt.fd_desk import FdDesk


class HostGroup(EPGroup):
    """Ranks of one host. The memory of a closed window goes when their processes do.

    Args:
        board: of all ranks; close() closes it.
        rank: of this process.
        joins: this process takes the place of one that has ended while the others go on.
        elastic: ranks may be lost and replaced; on all ranks alike.
    """

    def __init__(self, board: HostBoard, rank: int, *, joins: bool = False, elastic: bool = False):
        if env.get("EPRT_RANKS_PER_NODE") is not None:
            raise ValueError("EPRT_RANKS_PER_NODE splits the ranks of mpirun only: mpirun -n N python -m eprt.serve")
        self.rank, self.size, self.joins = rank, board.size, joins
        self._board = board
        self._elastic = elastic
        self._desk: FdDesk | None = None
        self._num_calls = 0
        self._set_up_s: float = env.get("EPRT_SET_UP_TIMEOUT_S")
        self._window_at = 0  # where the next window begins
        self._watch = PeerWatch({})
        board.hold_life(rank)
        self._join(rank, board.size)

    def allgather(self, value: Any) -> list[Any]:
        return self._exchange("allgather", value)

    def lasting_allgather(self, value: Any) -> Callable[[int], Any]:
        index = self._num_calls
        self._exchange("allgather", value)
        return lambda rank: value if rank == self.rank else self._await_value(rank, index, "allgather")

    def fd_desk(self) -> FdDesk | None:
        if self._desk is None and self._elastic:
            self._desk = FdDesk()
        return self._desk

    def barrier(self) -> None:
        self._exchange("barrier", None)

    def shared_window(self, num_bytes: int) -> SharedWindow:
        return self._make_window(num_bytes, clears=self.joins)

    def lasting_window(self, num_bytes: int) -> SharedWindow:
        return self._make_window(num_bytes, clears=False)

    def _make_window(self, num_bytes: int, clears: bool) -> SharedWindow:
        if self.size == 1:
            return private_window(num_bytes)
        before = self._board.read_value(self.rank, self._num_calls)
        if self.joins and before is not None and pickle.loads(before) != ("window", num_bytes):
            raise ValueError(
                f"[rank {self.rank}/{self.size}] cannot join: its memory of {num_bytes} B is not what the rank "
                f"{self.rank} before it had ({pickle.loads(before)}); give it the model and the flags of the others"
            )
        sizes = self._exchange("window", num_bytes)
        begin = self._window_at
        segments, self._window_at = self._board.map_window(begin, sizes)
        if clears:
            offset = segments[self.rank].ctypes.data - segments[0].ctypes.data
            self._board.clear_window(segments[self.rank], begin + offset)
        return SharedWindow(segments)

    def _adjacent_memory(self, num_bytes: int) -> AdjacentMemory:
        if self.size == 1:
            return super()._adjacent_memory(num_bytes)
        offset = self._board.arena_at + self._window_at
        segments = self.shared_window(num_bytes).segments  # of whole pages, so one begins where another ends
        whole_RB = np.lib.stride_tricks.as_strided(segments[0], (self.size, num_bytes), (num_bytes, 1))
        return AdjacentMemory(whole_RB, os.dup(self._board.fd), offset)

    def isend(self, buffer: np.ndarray, peer: int, tag: int) -> PendingMessage:
        raise ValueError(f"[rank {self.rank}/{self.size}] a group of one host sends no message to rank {peer}")

    def irecv(self, buffer: np.ndarray, peer: int, tag: int) -> PendingMessage:
        raise ValueError(f"[rank {self.rank}/{self.size}] a group of one host has no message from rank {peer}")

    def lost_ranks(self) -> tuple[int, ...]:
        died_R = self._board.died()
        if not died_R.any():
            return super().lost_ranks()
        died = {rank for rank in np.flatnonzero(died_R).tolist() if self.view.alive[rank]}
        return self._losses.in_order(died.union(super().lost_ranks()))

    def close(self) -> None:
        self._board.release_life(self.rank)
        self._watch.close()
        if self._desk is not None:
            self._desk.close()
        self._board.close()

    def _exchange(self, kind: str, value: Any) -> list[Any]:
        index = self._num_calls
        self._num_calls += 1
        self._board.write_value(self.rank, index, pickle.dumps((kind, value)))
        return [value if peer == self.rank else self._await_value(peer, index, kind) for peer in range(self.size)]

    def _await_value(self, peer: int, index: int, kind: str) -> Any:
        """The peer's value of this set-up call; None from a rank that does not take part and has not said it."""
        try:
            return self._read_when_there(peer, index, kind)
        finally:
            self.current_wait = None

    def _read_when_there(self, peer: int, index: int, kind: str) -> Any:
        start_s, sleep_s, phase = time.monotonic(), 2e-5, f"set-up call {index} ({kind})"
        while (said := self._board.read_value(peer, index)) is None:
            if not self.view.alive[peer]:
                return None
            # It may have spoken before it ended.
            if self._has_ended(peer) and self._board.read_value(peer, index) is None:
                raise RankLostError(self.rank, self.size, peer, phase)
            waited_s = time.monotonic() - start_s
            if waited_s > self._set_up_s:
                others = [r for r in range(peer + 1, self.size) if self._is_missing(r, index)]
                deadline = "EPRT_SET_UP_TIMEOUT_S"
                where = self.rank, self.size, peer, phase, index, index + 1, waited_s
                raise EPTimeoutError(*where, others=others, deadline=deadline)
            self.current_wait = CurrentWait(peer, phase, start_s)
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, 2e-3)
        their_kind, value = pickle.loads(said)
        if their_kind != kind:
            raise RuntimeError(
                f"[rank {self.rank}/{self.size}] set-up call {index} is {kind} here and {their_kind} on rank {peer}; "
                "all ranks must make the same calls in the same order"
            )
        return value

    def _is_missing(self, rank: int, index: int) -> bool:
        return rank != self.rank and self.view.alive[rank] and self._board.read_value(rank, index) is None

    def _has_ended(self, peer: int) -> bool:
        return self._board.has_ended(peer) or peer in self._watch.lost()
