"""`eprt join` of another host: what it asks, and what is wrong in one line."""

import contextlib
import errno
import os
import socket
import ssl
import threading
import urllib.error
from collections.abc import Iterator
from typing import ClassVar

import msgspec
import pytest

from eprt.serve import far_join
from eprt.serve.fingerprint import fingerprint
from eprt.serve.flags import parse_options
from eprt.serve.instances.far_joins import FarJoinAnswer, FarJoinRequest
from eprt.serve.options import RankConfig
from tests.unit.cases import MODEL
from tests.unit.serve.cases import QuietHandler, serving


def answer(model: str = "", host: str = "") -> FarJoinAnswer:
    options = parse_options(["--model", str(MODEL), "--decode", "1"])
    config = RankConfig(options, 0, 1, -1, "", "token", 0)
    return FarJoinAnswer(config, host, 99, model or fingerprint(str(MODEL)))


class _Server(QuietHandler):
    answers: ClassVar[list[tuple[int, bytes]]] = []
    asked: ClassVar[list[FarJoinRequest]] = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(msgspec.json.decode(body, type=FarJoinRequest))
        status, told = self.answers.pop()
        assert self.path == "/v1/eprt/instances/join" and self.headers["Authorization"] == "Bearer secret"
        self.answer(status, told)


@pytest.fixture
def url() -> Iterator[str]:
    with serving(_Server) as at:
        yield at


def ask(url: str, told: bytes, status: int = 200, model_dir: str | None = None) -> RankConfig:
    _Server.answers.append((status, told))
    return far_join.ask_server(url, "decode", 2, model_dir, "secret")


def test_it_is_told_where_its_ranks_connect(url):
    assert ask(url, msgspec.json.encode(answer())).endpoint == "tcp:127.0.0.1:99", "at the URL's host"
    assert ask(url, msgspec.json.encode(answer(host="10.0.0.7"))).endpoint == "tcp:10.0.0.7:99"
    assert _Server.asked[-1].model is None and _Server.asked[-1].ranks == 2
    assert ask(url, msgspec.json.encode(answer()), model_dir=str(MODEL)).options.engine.model_dir == str(MODEL)
    assert _Server.asked[-1].model == fingerprint(str(MODEL))


@pytest.mark.parametrize(
    "told, status, words",
    [
        (msgspec.json.encode(answer(model="other")), 200, "is another model here than on the server; give its dir"),
        (b'{"error": {"message": "only with --join-address"}}', 409, ": only with --join-address"),
        (b"proxy", 502, "status 502: proxy"),
        (b"{}", 200, "missing required field"),
    ],
)
def test_what_is_wrong_is_told(url, told, status, words):
    with pytest.raises(ValueError, match=words):
        ask(url, told, status)


def test_a_model_that_is_elsewhere_here_is_named(url, tmp_path):
    given = answer()
    engine = given.config.options.engine.__class__(model_dir=str(tmp_path))
    options = given.config.options.__class__(engine=engine, model_name="m")
    config = msgspec.structs.replace(given.config, options=options)
    with pytest.raises(ValueError, match="is not at that place here; give its directory: --model"):
        ask(url, msgspec.json.encode(msgspec.structs.replace(given, config=config)))


def test_a_server_that_does_not_answer_is_named():
    with pytest.raises(ValueError, match=r"http://127.0.0.1:1/v1/eprt/instances/join: .*refused\): is the server up"):
        far_join.ask_server("http://127.0.0.1:1", "decode", 1, None, None)


@pytest.mark.parametrize(
    "reason, words",
    [
        (
            OSError(errno.EHOSTUNREACH, "No route to host"),
            r"node7 cannot be reached .*\(No route to host\): is that host",
        ),
        (TimeoutError("timed out"), r"node7 cannot be reached from this host \(timed out\): is that host up"),
        (socket.gaierror(-2, "Name or service not known"), r"no address is known here for node7 \(Name .*: check the"),
        (
            ConnectionRefusedError(111, "Connection refused"),
            r"nothing of node7 takes .* port 8000 .* --host that other",
        ),
        (ssl.SSLError(1, "WRONG_VERSION_NUMBER"), "is it http:// or https://"),
    ],
)
def test_what_to_look_at_is_told(monkeypatch, reason, words):
    def fail(*_, **__):
        raise urllib.error.URLError(reason)

    monkeypatch.setattr(far_join, "_AGAIN_S", 0.0)
    monkeypatch.setattr(far_join, "_AGAIN_EVERY_S", 0.0)
    monkeypatch.setattr(far_join.urllib.request, "urlopen", fail)
    with pytest.raises(ValueError, match=words) as caught:
        far_join.ask_server("http://node7:8000", "decode", 1, None, None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "told, why",
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH-2.0-OpenSSH_9.6"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}", r"IncompleteRead\(2 bytes read, 97 more expected\)"),
        (b"", "Remote end closed connection without response"),  # as TLS does where http:// is asked
        (None, "timed out"),
    ],
)
def test_what_listens_there_and_is_no_server_is_told(monkeypatch, told, why):
    monkeypatch.setattr(far_join, "_ANSWER_S", 0.2 if told is None else 5.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reply() -> None:
            with listener.accept()[0] as sock:
                sock.settimeout(5.0)
                while b"}" not in sock.recv(1 << 16):
                    pass
                sock.sendall(told)

        if told is not None:
            threading.Thread(target=reply, daemon=True).start()
        words = rf"gives no answer of a server \({why}\): is it http:// or https://, and is that its HTTP port\?$"
        with pytest.raises(ValueError, match=words) as caught:
            far_join.ask_server(f"http://127.0.0.1:{listener.getsockname()[1]}", "decode", 1, None, None)
    assert "\n" not in str(caught.value) and "cannot be reached" not in str(caught.value)


def test_a_refused_port_is_that_of_the_scheme():
    refused = ConnectionRefusedError(111, "Connection refused")
    assert "at port 443 (" in far_join._why_unreachable("https://node7/v1", refused)


@pytest.mark.parametrize(
    "number, num_asked", [(errno.EHOSTUNREACH, 3), (errno.ENETUNREACH, 3), (errno.ECONNREFUSED, 1)]
)
def test_only_a_host_that_cannot_be_reached_yet_is_asked_again(monkeypatch, url, number, num_asked):
    asked, urlopen = [], far_join.urllib.request.urlopen

    def comes_up(*given, **options):
        asked.append(given)
        if len(asked) < 3:
            raise urllib.error.URLError(OSError(number, os.strerror(number)))
        return urlopen(*given, **options)

    monkeypatch.setattr(far_join, "_AGAIN_EVERY_S", 0.0)
    monkeypatch.setattr(far_join.urllib.request, "urlopen", comes_up)
    with pytest.raises(ValueError) if num_asked == 1 else contextlib.nullcontext():
        ask(url, msgspec.json.encode(answer()))
    assert len(asked) == num_asked
    _Server.answers.clear()


@pytest.mark.parametrize(
    "url, is_here", [("http://127.0.0.1:1", True), ("http://[::1]:1", True), ("http://192.0.2.1:1", False)]
)
def test_a_host_knows_its_own_addresses(url, is_here):
    assert far_join.is_of_this_host(url) == is_here
