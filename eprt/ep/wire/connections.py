"""The TCP connections of one rank's proxy threads: one per thread and rank of another node, proved by a key.

Of two ranks the higher one connects. Knows nothing of what the connections carry.
"""

import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

from eprt.door import Door
from eprt.ep.wire.meeting import connect, keep_alive, listen_for_ranks
from eprt.handshake import Caller


class PeerConnections:
    """Listens from construction to connect_all().

    Args:
        host: address of this host that the peers reach.
        rank: of this process.
        peers: ranks of other nodes.
        num_threads: connections to each of them.
        key: of this group and run.
    """

    def __init__(self, host: str, rank: int, peers: Iterable[int], num_threads: int, key: bytes):
        self._rank, self._peers, self._num_threads, self._key = rank, tuple(peers), num_threads, key
        self._listener = listen_for_ranks(host, 0)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._socks: dict[tuple[int, int], socket.socket] = {}  # by thread and peer
        # Who is to connect to this rank, and has not: by thread and peer.
        self._awaited = {(thread, peer) for peer in self._peers if peer > rank for thread in range(num_threads)}
        self._somebody_came = threading.Condition()

    def connect_all(self, address_of: list[tuple[str, int] | None], timeout_s: float) -> list[list[int]]:
        """Descriptors [thread][rank], -1 where there is none; they are the caller's. address_of: of every rank."""
        deadline = time.monotonic() + timeout_s
        door = Door(self._listener, self._key, self._welcome)
        try:
            for peer in self._peers:
                for thread in range(self._num_threads) if peer < self._rank else ():
                    address = address_of[peer]
                    assert address is not None, f"rank {peer} has told no address"
                    hello = {"rank": self._rank, "thread": thread}
                    self._socks[thread, peer] = connect(address, self._key, hello, deadline - time.monotonic())
            with self._somebody_came:
                self._somebody_came.wait_for(lambda: not self._awaited, deadline - time.monotonic())
        finally:
            door.close()
        missing = sorted({peer for peer in self._peers if (0, peer) not in self._socks})
        if missing:
            names = ", ".join(map(str, missing))
            raise ConnectionError(f"[rank {self._rank}] ranks {names} did not connect within {timeout_s:g} s")
        size = len(address_of)
        descriptors = [[-1] * size for _ in range(self._num_threads)]
        for (thread, peer), sock in self._socks.items():
            keep_alive(sock)
            sock.setblocking(False)
            descriptors[thread][peer] = sock.detach()
        return descriptors

    def _welcome(self, caller: Caller) -> str | None:
        place: Any = caller.hello.get("thread"), caller.hello.get("rank")
        with self._somebody_came:
            if place not in self._awaited:
                return f"rank {place[1]}, thread {place[0]}: not expected here"
            self._socks[place] = caller.accept()
            self._awaited.remove(place)
            self._somebody_came.notify()
        return None
