"""Door: a listening socket where those come in who prove that they have a key.

Each caller is heard in a thread of its own, for a short time, and of too many the oldest has to go: nobody who is
silent, slow or talks nonsense holds up the others. Knows nothing of what they come for.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from eprt.handshake import Caller, HandshakeError, hear

GREETING_S = 10.0  # from a connection to its proof
MAX_STRANGERS = 64  # connections without one
_LATER_S = 0.05  # the process has no descriptor or thread left


class Door:
    """Open from construction to close().

    Args:
        listener: is closed with the door.
        key: which callers must have.
        welcome: is given each caller that has the key, in the caller's thread, which may take long. Lets it in by
            accept(), or returns why it is refused.
        on_refused: hears from which address somebody was refused, and why.
        greeting_s: until a caller must have proved the key.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        welcome: Callable[[Caller], str | None],
        on_refused: Callable[[str, str], None] = lambda where, why: None,
        greeting_s: float = GREETING_S,
    ):
        self._listener, self._key, self._greeting_s = listener, key, greeting_s
        self._welcome, self._on_refused = welcome, on_refused
        self._strangers: dict[socket.socket, None] = {}  # in the order in which they came
        self._lock = threading.Lock()
        self._closed = threading.Event()
        listener.settimeout(None)
        threading.Thread(target=self._await_callers, name="eprt-door", daemon=True).start()

    def close(self) -> None:
        """Nobody comes in any more. Those who are in are not touched."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread inside accept()
        self._listener.close()
        with self._lock:
            for sock in self._strangers:
                _hang_up(sock)

    def _await_callers(self) -> None:
        while not self._closed.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError:  # the door was closed, the caller has gone again, or there is no descriptor left
                self._closed.wait(_LATER_S)
                continue
            with self._lock:
                if len(self._strangers) >= MAX_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    _hang_up(oldest)
                self._strangers[sock] = None
            try:
                threading.Thread(target=self._hear, args=(sock, address[0]), name="eprt-door", daemon=True).start()
            except RuntimeError:  # no thread left
                self._forget(sock)
                sock.close()
                self._closed.wait(_LATER_S)

    def _hear(self, sock: socket.socket, where: str) -> None:
        try:
            caller = hear(sock, self._key, time.monotonic() + self._greeting_s)
            self._forget(sock)
            why = "nobody is awaited any more" if self._closed.is_set() else self._welcome(caller)
            if why is not None:
                caller.refuse(why)
                self._on_refused(where, why)
        except HandshakeError as error:
            sock.close()
            self._on_refused(where, str(error))
        except (OSError, ValueError, KeyError, TypeError):  # it has gone, or says of itself what makes no sense
            sock.close()
        finally:
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(sock, None)


def _hang_up(sock: socket.socket) -> None:
    """Its thread, which waits for it, hears of its end."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
