"""Meeting: set-up calls among ranks that share nothing but a network: every rank's value to all, through rank 0.

Rank 0 runs a desk: a thread that admits the ranks and collects their values. Values are pickled, and read only from
connections whose other end has proved that it has the group's key (handshake.py). Knows nothing of what values mean.
"""

import contextlib
import ipaddress
import pickle
import select
import socket
import struct
import threading
import time
from typing import Any

from eprt import env
from eprt.dead_host import notice_dead_host
from eprt.door import Door
from eprt.ep.errors import EPTimeoutError, RankLostError
from eprt.handshake import Caller, HandshakeError, introduce, receive_exactly

_LENGTH = struct.Struct("<Q")
_RETRY_S = 0.05
_LOST_DESK: tuple[str, Any] = ("lost", 0)
_LATE_S = 5.0  # the desk's own deadline is later by so much than the ranks', so that each of them tells its own


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT. ValueError with the remedy."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"meeting address {text!r}: write HOST:PORT, an address of rank 0's host that all can reach")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether nobody on another host can come to this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_for_ranks(host: str, port: int) -> socket.socket:
    """A listening socket at an address of this host; OSError where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def keep_alive(sock: socket.socket) -> None:
    """What is sent goes at once, and the end of the other host is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    notice_dead_host(sock)


def connect(address: tuple[str, int], key: bytes, hello: dict[str, Any], timeout_s: float) -> socket.socket:
    """A connection on which both ends have proved the key. ConnectionError that names the address."""
    deadline = time.monotonic() + timeout_s
    where = f"{address[0]}:{address[1]}"
    while True:
        sock = None
        try:
            sock = socket.create_connection(address, timeout=max(0.1, deadline - time.monotonic()))
            introduce(sock, key, hello, deadline)
        except HandshakeError as error:
            sock.close() if sock else None
            raise ConnectionError(f"{where} refuses: {error}") from None
        except OSError as error:
            sock.close() if sock else None
            if time.monotonic() + _RETRY_S > deadline:
                raise ConnectionError(f"cannot reach {where} within {timeout_s:g} s: {error}") from None
            time.sleep(_RETRY_S)
        else:
            keep_alive(sock)
            return sock


class Meeting:
    """One rank's place at the meeting.

    Args:
        address: HOST:PORT of the desk; rank 0 binds it, port and all.
        rank, size: of this process, and how many there are.
        key: that all ranks have.
        timeout_s: until all ranks have come.
        listener: at the address, for rank 0, where somebody else has bound it.
        call_timeout_s: of a set-up call while all live: one rank may still load a model. Default EPRT_SET_UP_TIMEOUT_S.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        size: int,
        key: bytes,
        timeout_s: float,
        listener: socket.socket | None = None,
        call_timeout_s: float | None = None,
    ):
        self.rank, self.size = rank, size
        self._call_timeout_s: float = call_timeout_s or env.get("EPRT_SET_UP_TIMEOUT_S")
        self._where = f"[rank {rank}/{size}]"
        self._num_calls = 0
        self._lost: int | None = None
        place = parse_address(address)
        self._desk = _Desk(listener or _listen(place, size), size, key, timeout_s) if rank == 0 else None
        try:
            self._sock = connect(place, key, {"rank": rank, "size": size}, timeout_s)
            self._receive(time.monotonic() + timeout_s + 2 * _LATE_S, "the start", "EPRT_TIMEOUT_S")
        except BaseException:
            self.close()
            raise
        self.local_host: str = self._sock.getsockname()[0]  # the address from which this host reaches the desk

    def allgather(self, kind: str, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Every rank's value, in rank order. RankLostError, EPTimeoutError, RuntimeError where ranks disagree."""
        if self._lost is not None:
            raise RankLostError(self.rank, self.size, self._lost, "set-up")
        index = self._num_calls
        self._num_calls += 1
        self._send(("value", index, kind, pickle.dumps(value)))
        deadline = time.monotonic() + (self._call_timeout_s if timeout_s is None else timeout_s)
        values = self._receive(deadline, f"set-up call {index} ({kind})", "EPRT_SET_UP_TIMEOUT_S", index)
        return [pickle.loads(each) for each in values]

    def _send(self, message: tuple) -> None:
        data = pickle.dumps(message)
        try:
            self._sock.settimeout(self._call_timeout_s)
            self._sock.sendall(_LENGTH.pack(len(data)) + data)
        except OSError:
            self._lost = 0
            raise RankLostError(self.rank, self.size, 0, "set-up") from None

    def _receive(self, deadline: float, phase: str, deadline_name: str, index: int | None = None) -> Any:
        """index: of the set-up call; the desk can tell who is missing in it."""
        start_s = time.monotonic()
        try:
            message = self._next_message(deadline, index)
            if message is None and index is not None:
                self._send(("who", index))
                message = self._next_message(time.monotonic() + _LATE_S, index)
        except TimeoutError:  # amid a message
            message = None
        except OSError:
            message = _LOST_DESK
        missing: tuple[str, Any] = "missing", (index, [0])  # the desk itself does not answer
        what, content = message or missing
        if what == "missing":
            peer, *others = content[1]
            seen = self._num_calls - 1 if index is None else index
            where = self.rank, self.size, peer, phase, seen, seen + 1, time.monotonic() - start_s
            raise EPTimeoutError(*where, others=others, deadline=deadline_name)
        if what == "lost":
            self._lost = content
            raise RankLostError(self.rank, self.size, content, phase)
        if what == "error":
            raise RuntimeError(f"{self._where} {content}")
        return content

    def _next_message(self, deadline: float, index: int | None) -> tuple[str, Any] | None:
        """None where none has begun to come by the deadline. Who was missing in other calls, or is not any more, is of
        no interest."""
        while select.select([self._sock], [], [], max(0.0, deadline - time.monotonic()))[0]:
            what, content = _receive_message(self._sock, max(deadline, time.monotonic() + _LATE_S))
            if what != "missing" or (content[0] == index and content[1]):
                return what, content
        return None

    def close(self, patience_s: float = 0.0) -> None:
        """patience_s: that rank 0, where the desk is, stays for others that close too."""
        sock = self.__dict__.pop("_sock", None)
        if sock is not None:
            with contextlib.suppress(OSError, RankLostError):
                self._sock = sock
                self._send(("bye",))
            sock.close()
        if self._desk is not None:
            self._desk.close(patience_s)


def _listen(address: tuple[str, int], size: int) -> socket.socket:
    try:
        return listen_for_ranks(*address)
    except OSError as error:
        where = f"{address[0]}:{address[1]}"
        raise ConnectionError(
            f"[rank 0/{size}] cannot listen at the meeting address {where}: {error.strerror or error}; name an "
            "address of this host and a free port"
        ) from None


def _receive_message(sock: socket.socket, deadline: float) -> Any:
    (length,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size, deadline))
    return pickle.loads(receive_exactly(sock, length, deadline))


class _Desk:
    """The threads of rank 0 that collect values: one until all ranks have come, then one per rank."""

    def __init__(self, listener: socket.socket, size: int, key: bytes, timeout_s: float):
        self._size, self._timeout_s = size, timeout_s
        self._lock = threading.Lock()
        self._somebody_came = threading.Condition(self._lock)
        self._socks: dict[int, socket.socket] = {}
        self._writers: dict[int, socket.socket] = {}
        self._rounds: dict[int, dict[int, tuple[str, bytes]]] = {}  # call -> rank -> kind and value
        self._gone: set[int] = set()
        self._closed = False
        self._door = Door(listener, key, self._welcome)
        threading.Thread(target=self._await_all, name="eprt-desk", daemon=True).start()

    def _await_all(self) -> None:
        with self._lock:
            self._somebody_came.wait_for(
                lambda: self._closed or len(self._socks) == self._size, self._timeout_s + _LATE_S
            )
        self._door.close()
        if self._closed or len(self._socks) < self._size:
            self._tell_missing()
            return
        self._tell_all("all", None)
        for rank in list(self._socks):
            threading.Thread(target=self._serve, args=(rank,), name=f"eprt-desk-{rank}", daemon=True).start()

    def _welcome(self, caller: Caller) -> str | None:
        with self._lock:
            if refusal := self._refusal(caller.hello):
                return refusal
            sock = caller.accept()
            keep_alive(sock)
            # Timeouts are the socket object's: one for the thread that reads, one for those that write.
            writer = sock.dup()
            writer.settimeout(self._timeout_s)
            rank = caller.hello["rank"]
            self._writers[rank], self._socks[rank] = writer, sock
            self._somebody_came.notify()
        return None

    def _refusal(self, hello: dict[str, Any]) -> str | None:
        rank, size = hello.get("rank"), hello.get("size")
        if size != self._size:
            return f"rank {rank} says that there are {size} ranks, rank 0 says {self._size}"
        if not isinstance(rank, int) or not 0 <= rank < self._size:
            return f"rank {rank} is not one of 0 to {self._size - 1}"
        if rank in self._socks:
            return f"there is a rank {rank} already; give each process a rank of its own"
        return None

    def _tell_missing(self) -> None:
        missing = [rank for rank in range(self._size) if rank not in self._socks]
        if missing and not self._closed:
            names = ", ".join(map(str, missing))
            self._tell_all("error", f"ranks {names} did not come to the meeting within {self._timeout_s:g} s")

    def _serve(self, rank: int) -> None:
        try:
            while True:
                message = _receive_message(self._socks[rank], time.monotonic() + 1e7)
                if message[0] == "bye":
                    break
                if message[0] == "value":
                    self._add_value(rank, *message[1:])
                if message[0] == "who":
                    self._tell_who(rank, message[1])
        except Exception:  # whatever ended the connection, the rank is gone
            pass
        with self._lock:
            self._gone.add(rank)
            waited_for = any(rank not in values for values in self._rounds.values())
        if waited_for:
            self._tell_all("lost", rank)

    def _add_value(self, rank: int, index: int, kind: str, value: bytes) -> None:
        with self._lock:
            values = self._rounds.setdefault(index, {})
            values[rank] = (kind, value)
            missing = [other for other in range(self._size) if other not in values]
            gone = [other for other in missing if other in self._gone]
            if not missing:
                del self._rounds[index]
        if gone:
            self._tell_all("lost", gone[0])
        if missing:
            return
        kinds = {kind for kind, _ in values.values()}
        if len(kinds) > 1:
            said = ", ".join(f"{values[other][0]} on rank {other}" for other in sorted(values))
            self._tell_all("error", f"set-up call {index} is {said}; all ranks must make the same calls in order")
        else:
            self._tell_all("all", [values[other][1] for other in range(self._size)])

    def _tell_who(self, rank: int, index: int) -> None:
        """Tells one rank who is missing in a call; nobody where all have come meanwhile."""
        with self._lock:
            values = self._rounds.get(index)
            missing = [] if values is None else [other for other in range(self._size) if other not in values]
            data = pickle.dumps(("missing", (index, missing)))
            self._writers[rank].sendall(_LENGTH.pack(len(data)) + data)

    def _tell_all(self, what: str, content: Any) -> None:
        data = pickle.dumps((what, content))
        with self._lock:
            for rank, sock in self._writers.items():
                if rank not in self._gone:
                    with contextlib.suppress(OSError):
                        sock.sendall(_LENGTH.pack(len(data)) + data)

    def close(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while len(self._gone) < self._size and time.monotonic() < deadline:
            time.sleep(1e-3)
        with self._lock:
            self._closed = True
            self._somebody_came.notify()
        self._door.close()
        with self._lock:  # rank 0 may leave by what it was told before the others have been told it
            for sock in self._socks.values():
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            for sock in self._writers.values():
                sock.close()
