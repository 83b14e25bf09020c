"""HostLink: messages in any pieces, an end of file, bytes that are no message; and the secrets of a run."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from eprt.serve.hosts.link import HostLink, run_secret
from eprt.serve.hosts.messages import Begin, Ended, Serving, StopAsked, ToFirstHost, ToOtherHost
from eprt.serve.ranks.messages import pack

PATIENCE_S = 100.0


@pytest.fixture
def ends() -> Iterator[tuple[HostLink, socket.socket]]:
    """A link, and the socket at its other end."""
    mine, other = socket.socketpair()
    link = HostLink(mine, ToOtherHost)
    with contextlib.closing(link), other:
        yield link, other


def test_messages_in_pieces(ends):
    link, other = ends
    data = pack(Begin(b"n", 1, 2)) + pack(Serving())
    other.sendall(data[:7])
    assert link.receive(PATIENCE_S) == []
    other.sendall(data[7:])
    assert link.receive(PATIENCE_S) == [Begin(b"n", 1, 2), Serving()] and link.receive(0) == []
    assert not link.is_lost


def test_what_was_said_before_the_end_is_heard(ends):
    link, other = ends
    other.sendall(pack(Ended(1, "why")))
    other.shutdown(socket.SHUT_WR)
    assert link.receive(PATIENCE_S) == [Ended(1, "why")] and not link.is_lost
    assert link.receive(PATIENCE_S) == [] and link.is_lost
    assert link.receive(0) == []


@pytest.mark.parametrize("data", [b"\x03\0\0\0abc", pack(StopAsked())])
def test_bytes_that_are_no_message_of_this_end_lose_the_link(ends, data):
    link, other = ends
    other.sendall(data)
    assert link.receive(PATIENCE_S) == [] and link.is_lost


def test_sending_to_somebody_who_has_gone_is_no_error(ends):
    link, other = ends
    other.close()
    for _ in range(3):
        link.send(Serving())


def test_both_ends_send():
    a, b = socket.socketpair()
    first, guest = HostLink(a, ToFirstHost), HostLink(b, ToOtherHost)
    guest.send(StopAsked())
    first.send(Serving())
    assert first.receive(PATIENCE_S) == [StopAsked()] and guest.receive(PATIENCE_S) == [Serving()]
    first.close()
    guest.close()


def test_secrets_differ_by_key_run_and_purpose():
    secrets = {run_secret(key, nonce, purpose) for key in "ab" for nonce in (b"1", b"2") for purpose in (b"x", b"y")}
    assert len(secrets) == 8 and run_secret("a", b"1", b"x") in secrets
