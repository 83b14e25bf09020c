"""Handshake: two ends of a TCP connection prove to each other that they have the group's key, before anything else.

Each proves it by an HMAC over both ends' random numbers and over what the caller says of itself, so neither a replay
nor a changed word passes. What follows on the connection is neither encrypted nor signed. Knows nothing of what it is
for.
"""

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import time
from typing import Any

MAGIC = b"eprt-wire-1\n"
_NONCE = 32
_LENGTH = struct.Struct("<I")
_MAX_HELLO = 4096


class HandshakeError(ConnectionError):
    """The other end is no rank of this group; the message says why."""


def _proof(key: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, side + b"".join(_LENGTH.pack(len(part)) + part for part in parts), hashlib.sha256).digest()


def receive_exactly(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """ConnectionError where the other end closes, TimeoutError at the deadline (time.monotonic)."""
    data = bytearray()
    while len(data) < num_bytes:
        sock.settimeout(max(1e-3, deadline - time.monotonic()))
        part = sock.recv(min(num_bytes - len(data), 1 << 20))
        if not part:
            raise ConnectionError("the other end closed the connection")
        data += part
    return bytes(data)


def introduce(sock: socket.socket, key: bytes, hello: dict[str, Any], deadline: float) -> None:
    """The end that has connected says who it is. HandshakeError with the other end's words where that refuses."""
    sock.settimeout(max(1e-3, deadline - time.monotonic()))
    told, mine = json.dumps(hello).encode(), os.urandom(_NONCE)
    greeting = receive_exactly(sock, len(MAGIC) + _NONCE, deadline)
    if not greeting.startswith(MAGIC):
        raise HandshakeError("whoever listens there is no rank of eprt, or of another version")
    theirs = greeting[len(MAGIC) :]
    sock.sendall(_LENGTH.pack(len(told)) + told + mine + _proof(key, b"caller", theirs, mine, told))
    (length,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size, deadline))
    refusal = receive_exactly(sock, min(length, _MAX_HELLO), deadline)
    if refusal:
        raise HandshakeError(refusal.decode(errors="replace"))
    proof = receive_exactly(sock, hashlib.sha256().digest_size, deadline)
    if not hmac.compare_digest(proof, _proof(key, b"answer", mine, theirs)):
        raise HandshakeError("whoever listens there has another key; give all ranks the same EPRT_GROUP_KEY")


class Caller:
    """Who has proved the key, and waits to be let in.

    Attributes:
        hello: what it says of itself.
    """

    def __init__(self, sock: socket.socket, hello: dict[str, Any], proof: bytes):
        self._sock, self.hello, self._proof = sock, hello, proof

    def accept(self) -> socket.socket:
        """The connection, which is the caller's of this method now. OSError where the other end has gone."""
        self._sock.sendall(_LENGTH.pack(0) + self._proof)
        return self._sock

    def refuse(self, why: str) -> None:
        """Tells it why, and closes the connection."""
        _tell(self._sock, why)
        self._sock.close()


def hear(sock: socket.socket, key: bytes, deadline: float) -> Caller:
    """The end that listens hears who has connected. HandshakeError for whoever has not the key; it is told so."""
    sock.settimeout(max(1e-3, deadline - time.monotonic()))
    mine = os.urandom(_NONCE)
    sock.sendall(MAGIC + mine)
    (length,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size, deadline))
    if length > _MAX_HELLO:
        raise HandshakeError(f"a greeting of {length} bytes")
    told = receive_exactly(sock, length, deadline)
    theirs = receive_exactly(sock, _NONCE, deadline)
    proof = receive_exactly(sock, hashlib.sha256().digest_size, deadline)
    if not hmac.compare_digest(proof, _proof(key, b"caller", mine, theirs, told)):
        refusal = "another key; give all ranks the same EPRT_GROUP_KEY"
        _tell(sock, refusal)
        raise HandshakeError(refusal)
    try:
        hello = json.loads(told)
    except (ValueError, RecursionError):
        hello = None
    if not isinstance(hello, dict):
        raise HandshakeError("a greeting that is no JSON object")
    return Caller(sock, hello, _proof(key, b"answer", theirs, mine))


def _tell(sock: socket.socket, refusal: str) -> None:
    words = refusal.encode()
    with contextlib.suppress(OSError):
        sock.sendall(_LENGTH.pack(len(words)) + words)
