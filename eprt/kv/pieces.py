"""Many pieces of memory through one socket: as few calls as the system allows. Knows nothing of pages."""

import socket
from collections.abc import Callable, Sequence

import numpy as np

_MOST_PIECES = 512  # in one call; the system takes 1024


def send_pieces(sock: socket.socket, pieces: Sequence[memoryview]) -> None:
    """OSError where the other end is gone, or has taken nothing for the socket's timeout."""
    _move(pieces, sock.sendmsg)


def receive_pieces(sock: socket.socket, pieces: Sequence[memoryview]) -> None:
    """Fills them. OSError likewise."""

    def receive(some: Sequence[memoryview]) -> int:
        num_bytes, *_ = sock.recvmsg_into(some)
        if num_bytes == 0:
            raise ConnectionError("the other end closed the connection")
        return num_bytes

    _move(pieces, receive)


def _move(pieces: Sequence[memoryview], move: Callable[[Sequence[memoryview]], int]) -> None:
    waiting = [piece for piece in pieces if len(piece)]
    first = 0
    while first < len(waiting):
        some = waiting[first : first + _MOST_PIECES]
        num_bytes = move(some)
        for piece in some:
            if num_bytes < len(piece):
                waiting[first] = piece[num_bytes:]
                break
            num_bytes -= len(piece)
            first += 1


def page_pieces(parts_LPB: Sequence[np.ndarray], pages: Sequence[int]) -> list[memoryview]:
    """The bytes of some pages, in the order in which they travel: by part, page and layer."""
    return [memoryview(layer_B) for part_LPB in parts_LPB for page in pages for layer_B in part_LPB[:, page]]
