"""HostLink: the connection between two launchers, whose ends have proved the group's key.

Its end of file says that the other launcher is gone; a host that loses power is noticed after five seconds. Knows
nothing of what the messages mean.
"""

import contextlib
import hashlib
import hmac
import select
import socket
from typing import Any

from eprt.serve.ranks.messages import Unpacker, pack

_SEND_S = 5.0


def run_secret(key: str, nonce: bytes, purpose: bytes) -> str:
    """A secret that both ends can tell, and nobody who lacks the group's key."""
    return hmac.new(key.encode(), purpose + nonce, hashlib.sha256).hexdigest()


class HostLink:
    """kind: the union of messages that are expected on this end."""

    def __init__(self, sock: socket.socket, kind: Any):
        self._sock, self._unpacker = sock, Unpacker(kind)
        self.is_lost = False  # the other end has closed, died or sent what is no message
        sock.settimeout(_SEND_S)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Any) -> None:
        """What cannot be sent is dropped: the link is lost, or soon will be."""
        with contextlib.suppress(OSError):
            self._sock.sendall(pack(message))

    def receive(self, timeout_s: float) -> list[Any]:
        """The messages that have arrived, or arrive within the time. None, and is_lost, where the other end is gone."""
        if self.is_lost or not select.select([self._sock], [], [], timeout_s)[0]:
            return []
        try:
            data = self._sock.recv(1 << 16)
            messages = self._unpacker.add_bytes(data)
        except (OSError, ValueError):
            data, messages = b"", []
        self.is_lost = not data
        return messages

    def close(self) -> None:
        self._sock.close()
