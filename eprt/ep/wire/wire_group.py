"""WireGroup: an EPGroup of ranks that share neither memory nor files, without MPI: they meet at an address.

Set-up calls go through rank 0 (meeting.py). Ranks of a node share memory as in every group; between nodes messages are
puts and posts of the native proxy (csrc/wire), over TCP or over memory at the pace of a network.
"""

import ctypes
import secrets
import socket
from typing import Any

import numpy as np

from eprt import env
from eprt.ep.errors import EPError
from eprt.ep.group.group import MAX_CLOSE_S, EPGroup, PendingMessage
from eprt.ep.group.memfd import memfd_window
from eprt.ep.group.window import SharedWindow, private_window
from eprt.ep.wire.connections import PeerConnections
from eprt.ep.wire.library import CShape, call_wire, load_library
from eprt.ep.wire.meeting import Meeting, is_loopback, parse_address
from eprt.ep.wire.options import WireOptions

_DIED = 3  # PeerState of csrc/wire/board.h
_MAX_CHANNELS = 16


class WireMessage:
    """A PendingMessage of the proxy. Its buffer lives until it is done or given up."""

    __slots__ = ("_buffer", "_group", "_number")

    def __init__(self, group: "WireGroup", number: int, buffer: np.ndarray):
        self._group, self._number, self._buffer = group, number, buffer
        group._open_buffers[number] = buffer

    def test(self) -> bool:
        handle = self._group._handle
        if not handle:
            raise ConnectionError("this rank has closed the group")
        done = call_wire("test", handle, self._number) == 1
        if done:
            self._group._open_buffers.pop(self._number, None)
        return done

    def cancel(self) -> None:
        if self._group._handle:
            load_library().eprt_wire_cancel(ctypes.c_int64(self._group._handle), ctypes.c_int64(self._number))


class WireGroup(EPGroup):
    """Ranks that were started on any hosts, by hand or by a scheduler.

    Args:
        meeting: HOST:PORT, an address of rank 0's host that all can reach.
        rank, size: of this process, and how many there are.
        wire: WireOptions, as an object or as text, such as "tcp" or "paced:gbps=25,latency_us=3".
        key: secret of the group; default EPRT_GROUP_KEY. Without one only a loopback address will do.
        listener: at the meeting's address, for rank 0, where somebody else has bound it; the group closes it.
    """

    def __init__(
        self,
        meeting: str,
        rank: int,
        size: int,
        *,
        wire: WireOptions | str = "tcp",
        key: str | None = None,
        listener: socket.socket | None = None,
    ):
        self._wire = WireOptions.from_text(wire) if isinstance(wire, str) else wire
        self.gpu_wire = self._wire.gpu  # the backend between GPUs of different nodes, or ""
        self.gpu_copies = self._wire.copies  # that it makes of a token
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}: must be one of 0 to {size - 1}")
        key = env.get("EPRT_GROUP_KEY") if key is None else key
        if not key and not is_loopback(parse_address(meeting)[0]):
            raise ValueError(
                f"[rank {rank}/{size}] whoever reaches {meeting} could join: set EPRT_GROUP_KEY to the same secret on "
                "all hosts"
            )
        load_library()
        self._handle = 0
        self._closed = False
        self._open_buffers: dict[int, np.ndarray] = {}  # of messages, by number
        self._set_up_s = env.get("EPRT_TIMEOUT_S")
        self._meeting = Meeting(meeting, rank, size, (key or "").encode(), self._set_up_s, listener)
        try:
            self._join(rank, size)
            self._check_options()
            self._elsewhere = tuple(r for r in range(size) if self.node_of_rank[r] != self.node)
            self._open()
        except BaseException:
            self._meeting.close()
            raise

    def _check_options(self) -> None:
        everyones = self.allgather(self._wire)
        for other, wire in enumerate(everyones):
            if wire != everyones[0]:
                raise ValueError(f"rank {other} has {wire}, rank 0 has {everyones[0]}; give all ranks the same wire")
        if self._wire.kind == "paced" and self.num_ranks_on_host != self.size:
            raise ValueError(
                f"[rank {self.rank}/{self.size}] the paced wire is memory of one host, and only "
                f"{self.num_ranks_on_host} of {self.size} ranks are on this one; write tcp"
            )

    def _open(self) -> None:
        wire, silence_s = self._wire, self._wire.silence_s or self._set_up_s
        shape = CShape(
            rank=self.rank,
            num_ranks=self.size,
            num_threads=wire.threads,
            num_channels=max(wire.threads, min(_MAX_CHANNELS, self.size)),
            ring_capacity=wire.ring,
            arena_bytes=wire.arena_kib << 10,
            silence_ns=round(silence_s * 1e9),
            spin_ns=0,
        )
        if wire.kind == "tcp":
            self._handle = self._open_tcp(shape)
        else:
            self._segments = memfd_window(call_wire("segment_bytes", shape), self.allgather)
            bases = [each.ctypes.data for each in self._segments.segments]
            reached = [base if r in (self.rank, *self._elsewhere) else 0 for r, base in enumerate(bases)]
            self._handle = call_wire("open_paced", shape, (ctypes.c_int64 * self.size)(*reached), wire.pace())
        self.barrier()

    def _open_tcp(self, shape: CShape) -> int:
        session = self.allgather(secrets.token_bytes(32))[0]
        connections = None
        if self._elsewhere:
            host, threads = self._meeting.local_host, self._wire.threads
            connections = PeerConnections(host, self.rank, self._elsewhere, threads, session)
        addresses = self.allgather(connections and connections.address)
        sockets = [[-1] * self.size for _ in range(self._wire.threads)]
        if connections is not None:
            sockets = connections.connect_all(addresses, self._set_up_s)
        flat = [fd for of_thread in sockets for fd in of_thread]
        return call_wire("open_tcp", shape, (ctypes.c_int32 * len(flat))(*flat))

    # -- set-up calls --

    def allgather(self, value: Any) -> list[Any]:
        return self._meeting.allgather("allgather", value)

    def barrier(self) -> None:
        self._meeting.allgather("barrier", None)

    def shared_window(self, num_bytes: int) -> SharedWindow:
        # All ranks of the group take part in the allgather, each with the memory of its own node.
        if all(len(self.ranks_of_node(node)) == 1 for node in range(self.num_nodes)):
            return private_window(num_bytes)

        def of_this_node(value: Any) -> list[Any]:
            values = self.allgather(value)
            return [values[rank] for rank in self.local_ranks]

        return memfd_window(num_bytes, of_this_node)

    # -- messages --

    def isend(self, buffer: np.ndarray, peer: int, tag: int) -> PendingMessage:
        return WireMessage(self, call_wire("send", self._handle, peer, tag, buffer.ctypes.data, buffer.nbytes), buffer)

    def irecv(self, buffer: np.ndarray, peer: int, tag: int) -> PendingMessage:
        number = call_wire("receive", self._handle, peer, tag, buffer.ctypes.data, buffer.nbytes)
        return WireMessage(self, number, buffer)

    def lost_ranks(self) -> tuple[int, ...]:
        """Also ranks of other nodes whose connection has ended without a goodbye."""
        lost = set(super().lost_ranks())
        if self._handle:
            died = [rank for rank in self._elsewhere if call_wire("peer_state", self._handle, rank) == _DIED]
            lost.update(rank for rank in died if self.view.alive[rank])
        return self._losses.in_order(lost)

    def end_proxy_thread(self, thread: int) -> None:
        """Fault injection: a thread of this rank's proxy ends, as if by an error."""
        if not 0 <= thread < self._wire.threads:
            raise ValueError(f"[rank {self.rank}/{self.size}] no proxy thread {thread}; there are {self._wire.threads}")
        load_library().eprt_wire_end_thread(ctypes.c_int64(self._handle), ctypes.c_int64(thread))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._meeting.allgather("close", None, timeout_s=min(self._set_up_s, MAX_CLOSE_S))
            patience_s = MAX_CLOSE_S
        except (EPError, RuntimeError):
            patience_s = 0.0
        handle, self._handle = self._handle, 0
        if handle:
            load_library().eprt_wire_close(ctypes.c_int64(handle))
        self._open_buffers.clear()
        self._meeting.close(patience_s)
        self._watch.close()
