"""FdDesk: gives open files of this process to other processes of this host and user that ask for them.

For memory that has no name but a descriptor. Knows nothing of what the files are.
"""

import os
import secrets
import socket
import struct
import threading
from typing import NamedTuple

_NUMBER, _CREDENTIALS = struct.Struct("<I"), struct.Struct("3i")  # pid, uid, gid
_PATIENCE_S = 30.0


class FdTicket(NamedTuple):
    """By which any process of the user gets a file."""

    desk: str
    number: int


class FdDesk:
    """A thread answers, so that nobody waits for what this process computes. Descriptors that are offered are the
    desk's, and stay open as long as it does."""

    def __init__(self):
        self.name = f"eprt-fds-{os.getpid()}-{secrets.token_hex(8)}"
        self._fds: dict[int, int] = {}
        self._num_offered = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(128)
        self._thread = threading.Thread(target=self._serve, name="eprt-fds", daemon=True)
        self._thread.start()

    def offer(self, fd: int) -> FdTicket:
        number, self._num_offered = self._num_offered, self._num_offered + 1
        self._fds[number] = fd
        return FdTicket(self.name, number)

    def withdraw(self, ticket: FdTicket) -> None:
        """Nobody gets the file any more."""
        os.close(self._fds.pop(ticket.number))

    @staticmethod
    def fetch(ticket: FdTicket) -> int:
        """A descriptor of the same file, the caller's. OSError where the process that offered it has ended."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as asking:
            asking.settimeout(_PATIENCE_S)
            asking.connect(f"\0{ticket.desk}")
            asking.sendall(_NUMBER.pack(ticket.number))
            _, fds, _, _ = socket.recv_fds(asking, 1, 1)
        if not fds:
            raise ConnectionError(f"no file {ticket.number} at {ticket.desk}")
        return fds[0]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _serve(self) -> None:
        while True:
            try:
                asking, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                with asking:
                    asking.settimeout(_PATIENCE_S)
                    self._answer(asking)
            except OSError:  # it has gone
                continue

    def _answer(self, asking: socket.socket) -> None:
        credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
            return
        asked = asking.recv(_NUMBER.size, socket.MSG_WAITALL)
        if len(asked) == _NUMBER.size and (number := _NUMBER.unpack(asked)[0]) in self._fds:
            socket.send_fds(asking, [b"f"], [self._fds[number]])
