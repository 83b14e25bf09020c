"""`eprt join` beside the door: what is wrong in one line, and how it ends. The door itself: ranks/test_join_door.py."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from eprt.serve import join
from tests.serve.processes import wait_until
from tests.unit.cases import MODEL
from tests.unit.serve.cases import QuietHandler, serving

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["http://127.0.0.1"], "give the server's URL with its port"),
        (["http://127.0.0.1:99999"], "http://127.0.0.1:99999: give the server's URL with its port"),
        (["http://127.0.0.1:x"], "http://127.0.0.1:x: give the server's URL with its port"),
        (["http://127.0.0.1:1"], "no server of this host with --max-lost-ranks or --decode takes ranks at port 1"),
        (["http://127.0.0.1:1"], "(Connection refused): is it up, is that its HTTP port, and is this the same network"),
        (["http://["], "http://[: give the server's URL with its port"),
        (["http://[", "--role", "decode"], "http://[: give the server's URL with its port"),
        (["http://" + "a" * 70 + ":1", "--role", "decode"], "no server of this host"),
        (["http://127.0.0.1:1", "--model", "/nowhere"], "--model /nowhere: no such directory"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, words, capsys):
    assert join.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("eprt join: error: ") and words in said and said.count("\n") == 1


def test_a_key_of_the_environment_that_is_none_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("EPRT_API_KEY", "two\nlines")
    assert join.main(["http://127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("eprt join: error: environment variable EPRT_API_KEY: ") and said.count("\n") == 1


@pytest.fixture
def door(monkeypatch) -> Iterator[socket.socket]:
    """A door at which somebody listens, and answers as a test says."""
    name = f"\0eprt-test-join-{os.getpid()}"
    monkeypatch.setattr(join, "door_name", lambda port: name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(name)
        listening.listen(1)
        yield listening


def test_a_server_of_another_user_is_not_asked(door, monkeypatch, capsys):
    monkeypatch.setattr(join.os, "geteuid", lambda: os.getuid() + 1)
    assert join.main(["http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == "eprt join: error: http://127.0.0.1:1: the server belongs to another user\n"


def test_a_server_that_says_nothing_is_one_line(door, capsys):
    def close_at_once() -> None:
        with door.accept()[0] as sock:
            sock.recv(1 << 16)

    closing = threading.Thread(target=close_at_once)
    closing.start()
    assert join.main(["http://127.0.0.1:1"]) == 2
    closing.join(60)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("eprt join: error: http://127.0.0.1:1: no server"), said


def test_a_model_that_cannot_be_read_is_one_line(monkeypatch, capsys):
    def fail(model_dir: str) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(join, "fingerprint", fail)
    assert join.main(["http://127.0.0.1:1", "--model", str(MODEL)]) == 2
    assert capsys.readouterr().err == f"eprt join: error: --model {MODEL}: cannot be read: Permission denied\n"


@pytest.fixture
def kept_signals() -> Iterator[None]:
    before = [signal.getsignal(number) for number in STOPS]
    yield
    for number, handler in zip(STOPS, before):
        signal.signal(number, handler)


def rank(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)


def send_when_caught(number: int) -> None:
    """The signal to this process, once it no longer means what it did: the end of all tests, maybe."""
    before = signal.getsignal(number)

    def send() -> None:
        wait_until(lambda: signal.getsignal(number) is not before, "a handler")
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize(
    "code, status", [("", 0), ("raise SystemExit(2)", 2), ("import os; os.kill(os.getpid(), 9)", 1)]
)
def test_its_status_is_that_of_the_rank(kept_signals, code, status):
    with rank(code) as process:
        assert join._wait(process, lambda: pytest.fail("nobody asked for it")) == status


def test_a_signal_retires_the_rank(kept_signals):
    with rank("input()") as process:
        stdin = process.stdin
        assert stdin is not None
        send_when_caught(signal.SIGINT)
        assert join._wait(process, lambda: bool(stdin.write(b"\n")) and not stdin.flush()) == 0


def test_a_rank_that_may_not_retire_is_killed(kept_signals):
    with rank("input()") as process:
        send_when_caught(signal.SIGTERM)
        assert join._wait(process, lambda: False) == 1


class _Server(QuietHandler):
    """Lets rank 1 go to whoever has the key."""

    def do_POST(self):
        allowed = self.path == "/v1/eprt/ranks/1/retire" and self.headers["Authorization"] == "Bearer secret"
        body = b"{}" if allowed else b"only rank 1, and with the key"
        self.answer(202 if allowed else 409, body)


@pytest.fixture
def url() -> Iterator[str]:
    with serving(_Server) as at:
        yield at


def test_the_server_is_asked_with_the_key(url, capsys):
    assert join._retire(url, 1, "secret") and not capsys.readouterr().err
    assert not join._retire(url, 2, "secret")
    assert capsys.readouterr().err == "eprt join: rank 2 cannot retire: only rank 1, and with the key\n"
    assert not join._retire("http://127.0.0.1:1", 1, None)
    assert "rank 1 cannot retire: " in capsys.readouterr().err
