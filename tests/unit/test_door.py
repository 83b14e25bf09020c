"""Door: who has the key comes in, whoever else is at the port; every refusal is told to both sides."""

import contextlib
import errno
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from eprt import door as door_module
from eprt.door import MAX_STRANGERS, Door
from eprt.handshake import Caller, HandshakeError, introduce

PATIENCE_S = 100.0
KEY = b"k"


class House:
    """A door, those who came in, and those who were refused."""

    def __init__(self, listener: Any, greeting_s: float = PATIENCE_S, refuses: str | None = None):
        self.address = listener.getsockname()
        self.guests: dict[int, socket.socket] = {}
        self.refused: list[tuple[str, str]] = []
        self._refuses, self._came = refuses, threading.Condition()
        self.door = Door(listener, KEY, self._welcome, self._on_refused, greeting_s)

    def _welcome(self, caller: Caller) -> str | None:
        if self._refuses is not None:
            return self._refuses
        with self._came:
            self.guests[caller.hello["number"]] = caller.accept()
            self._came.notify_all()
        return None

    def _on_refused(self, where: str, why: str) -> None:
        with self._came:
            self.refused.append((where, why))
            self._came.notify_all()

    def wait(self, condition) -> None:
        with self._came:
            assert self._came.wait_for(condition, PATIENCE_S)

    def call(self, number: int = 0, key: bytes = KEY) -> socket.socket:
        sock = self.stranger()
        introduce(sock, key, {"number": number}, time.monotonic() + PATIENCE_S)
        return sock

    def stranger(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=PATIENCE_S)


@contextlib.contextmanager
def house(**options) -> Iterator[House]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = House(listener, **options)
        yield one
        one.door.close()
        for guest in one.guests.values():
            guest.close()


def ends(sock: socket.socket) -> bool:
    """Reads until the other end hangs up."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            pass
    return True


def test_who_is_silent_holds_up_nobody():
    with house() as one, contextlib.ExitStack() as open_socks:
        for _ in range(MAX_STRANGERS // 2):
            open_socks.enter_context(one.stranger())
        for number in range(20):
            open_socks.enter_context(one.call(number))
        one.wait(lambda: len(one.guests) == 20)


def test_of_too_many_strangers_the_oldest_goes_and_no_guest():
    with house() as one, contextlib.ExitStack() as open_socks:
        guest = open_socks.enter_context(one.call(7))
        one.wait(lambda: one.guests)
        strangers = [open_socks.enter_context(one.stranger()) for _ in range(MAX_STRANGERS + 1)]
        assert ends(strangers[0])
        open_socks.enter_context(one.call(8))
        one.wait(lambda: len(one.guests) == 2)
        assert ends(strangers[1])
        one.guests[7].sendall(b"still here")
        assert guest.recv(100) == b"still here"


def test_who_says_nothing_for_long_is_hung_up():
    with house(greeting_s=0.05) as one, one.stranger() as silent, one.stranger() as slow:
        slow.sendall(b"\2")
        assert ends(silent) and ends(slow)
        assert not one.refused


@pytest.mark.parametrize("hello", [b"[1]", b"7", b"{", b"\xff", b"[" * 4096, b"null", b'"x"'])
def test_greetings_that_are_no_object_even_with_the_key(hello):
    from eprt.handshake import MAGIC, _proof, receive_exactly

    with house() as one, one.stranger() as sock:
        nonce = receive_exactly(sock, len(MAGIC) + 32, time.monotonic() + PATIENCE_S)[len(MAGIC) :]
        proof = _proof(KEY, b"caller", nonce, b"n" * 32, hello)
        sock.sendall(struct.pack("<I", len(hello)) + hello + b"n" * 32 + proof)
        assert ends(sock) and not one.guests
        one.call(1).close()


def test_garbage_and_other_keys_are_refused_and_told():
    with house() as one:
        with one.stranger() as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert ends(stranger)
        with pytest.raises(HandshakeError, match="another key"):
            one.call(key=b"other")
        one.wait(lambda: len(one.refused) == 2)
        assert {where for where, _ in one.refused} == {"127.0.0.1"}
        assert "a greeting of 542393671 bytes" in one.refused[0][1] and "another key" in one.refused[1][1]
        one.call(1).close()


def test_the_welcome_may_refuse():
    with house(refuses="we are full") as one:
        with pytest.raises(HandshakeError, match="we are full"):
            one.call()
        one.wait(lambda: one.refused == [("127.0.0.1", "we are full")])


class _Poor:
    """A listener whose process has no descriptor left for a while."""

    def __init__(self, listener: socket.socket, times: int):
        self._listener, self._times = listener, times

    def accept(self) -> tuple[socket.socket, Any]:
        if self._times:
            self._times -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def test_a_process_without_descriptors_lets_in_later(monkeypatch):
    monkeypatch.setattr(door_module, "_LATER_S", 1e-3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = House(_Poor(listener, 5))
        one.call(3).close()
        one.wait(lambda: 3 in one.guests)
        one.door.close()
        one.guests[3].close()


def test_a_closed_door_hangs_up_who_has_not_come_in():
    with house() as one, one.stranger() as silent, one.call(1) as guest:
        one.wait(lambda: one.guests)
        silent.recv(1)  # it is heard
        one.door.close()
        assert ends(silent)
        with pytest.raises(OSError):
            one.stranger()
        one.guests[1].sendall(json.dumps("in").encode())
        assert guest.recv(10) == b'"in"'
