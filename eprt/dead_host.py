"""Connections to a host that goes away without a word. Knows nothing of what they carry."""

import socket


def notice_dead_host(sock: socket.socket) -> None:
    """A host that loses power sends no end of file: the kernel probes after 2 s of silence and gives up after 5 s."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
