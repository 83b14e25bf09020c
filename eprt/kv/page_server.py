"""KVPageServer: sends pages of this process's cache to readers on other hosts. A thread for each that has connected.

A reader proves that it knows the cache's owner, which only the server and its ranks do (handshake.py); then it asks:

    reader    "<BI": PAGES and how many, then "<I" for each; or AGENT and 0
    server    the bytes of these pages, by part, page and layer; or "<I" and as many bytes: how NIXL reaches the cache

What is asked for is sent as it is: whether it still is what it was, the reader finds by the checksums that it has.
Knows nothing of requests.
"""

import contextlib
import socket
import struct
import time
from collections.abc import Sequence

import numpy as np

from eprt.dead_host import notice_dead_host
from eprt.door import Door
from eprt.handshake import Caller, receive_exactly
from eprt.kv.pieces import page_pieces, send_pieces

PAGES, AGENT = 0, 1
QUESTION, NUMBER = struct.Struct("<BI"), struct.Struct("<I")
PATIENCE_S = 5.0  # for an end that should send or take something
_LONGEST_SILENCE_S = 10 * 365 * 86400.0  # between two questions; the kernel notices a host that is gone


class KVPageServer:
    """Serves until the process ends.

    Args:
        parts_LPB: of the cache.
        host: the address at which it listens; the system chooses the port.
        owner: what readers must know.
        agent: what NIXL's readers must know (AgentDescription); None: they cannot come.
    """

    def __init__(self, parts_LPB: Sequence[np.ndarray], host: str, owner: str, agent: bytes | None = None):
        self._parts_LPB, self._agent = parts_LPB, agent
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=128)
        self.port: int = listener.getsockname()[1]
        self._door = Door(listener, owner.encode(), self._serve, greeting_s=PATIENCE_S)

    def close(self) -> None:
        """No more readers come; those that are there are served."""
        self._door.close()

    def _serve(self, caller: Caller) -> None:
        with caller.accept() as sock, contextlib.suppress(OSError, ValueError):  # the reader has gone, or is none
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            notice_dead_host(sock)
            while True:
                kind, num = QUESTION.unpack(self._receive(sock, QUESTION.size, _LONGEST_SILENCE_S))
                if kind == PAGES:
                    asked = self._receive(sock, num * NUMBER.size, PATIENCE_S)
                    self._send_pages(sock, np.frombuffer(asked, dtype="<u4").tolist())
                elif kind == AGENT and self._agent is not None:
                    send_pieces(sock, [memoryview(NUMBER.pack(len(self._agent))), memoryview(self._agent)])
                else:
                    return

    def _receive(self, sock: socket.socket, num_bytes: int, timeout_s: float) -> bytes:
        return receive_exactly(sock, num_bytes, time.monotonic() + timeout_s)

    def _send_pages(self, sock: socket.socket, pages: Sequence[int]) -> None:
        if max(pages, default=0) >= self._parts_LPB[0].shape[1]:
            raise ValueError("a page that is not there")
        sock.settimeout(PATIENCE_S)
        send_pieces(sock, page_pieces(self._parts_LPB, pages))
