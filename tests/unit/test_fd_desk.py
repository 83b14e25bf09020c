"""FdDesk: open files go to other processes of the same user."""

import gc
import os
import pickle
import subprocess
import sys

import pytest

from eprt.fd_desk import FdDesk, FdTicket


def offered(desk: FdDesk, content: bytes) -> FdTicket:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return desk.offer(fd)


def read(ticket: FdTicket) -> bytes:
    fd = FdDesk.fetch(ticket)
    try:
        return os.pread(fd, 100, 0)
    finally:
        os.close(fd)


def test_each_ticket_brings_its_own_file_as_often_as_it_is_asked_for():
    desk, other = FdDesk(), FdDesk()
    tickets = [offered(desk, b"one"), offered(desk, b"two"), offered(other, b"three")]
    for _ in range(3):
        assert [read(ticket) for ticket in tickets] == [b"one", b"two", b"three"]
    desk.close()
    assert read(tickets[2]) == b"three"
    other.close()


def test_another_process_gets_the_file():
    desk = FdDesk()
    ticket = pickle.dumps(offered(desk, b"shared")).hex()
    program = (
        "import os, pickle; from eprt.fd_desk import FdDesk; "
        f"print(os.pread(FdDesk.fetch(pickle.loads(bytes.fromhex({ticket!r}))), 100, 0).decode())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.stdout == "shared\n", ended.stderr
    desk.close()


def test_a_file_that_is_not_there_or_a_desk_that_is_gone_is_an_error_of_the_system():
    desk = FdDesk()
    ticket, kept = offered(desk, b"x"), offered(desk, b"y")
    desk.withdraw(ticket)
    with pytest.raises(OSError, match="no file 0 at eprt-fds-"):
        FdDesk.fetch(ticket)
    assert read(kept) == b"y"
    gc.collect()  # files that other tests have forgotten
    before = len(os.listdir("/proc/self/fd"))
    desk.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2  # the listener, and the file
    with pytest.raises(ConnectionRefusedError):
        FdDesk.fetch(kept)


def test_other_users_get_nothing(monkeypatch):
    desk = FdDesk()
    ticket = offered(desk, b"x")
    monkeypatch.setattr(os, "geteuid", lambda: 77777)
    with pytest.raises(OSError, match=r"no file|reset|pipe"):
        FdDesk.fetch(ticket)
    monkeypatch.undo()
    assert read(ticket) == b"x"
    desk.close()
