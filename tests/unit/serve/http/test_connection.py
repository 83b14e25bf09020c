"""What a client does to the head of a request ends in a refusal or a closed connection, never in one held for good."""

import asyncio
import contextlib
import json
import subprocess
import sys
from typing import Any

import pytest
import uvicorn

from eprt.serve.http import connection
from eprt.serve.http.connection import Connection

_told: list[str] = []  # what became of answers that take their time


async def _app(scope, receive, send) -> None:
    if scope["path"] == "/stream":
        return await _stream(receive, send)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def _stream(receive, send) -> None:
    while (await receive())["more_body"]:
        pass
    gone = asyncio.create_task(receive())
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(20):
        await send({"type": "http.response.body", "body": b"word ", "more_body": True})
        if (await asyncio.wait((gone,), timeout=0.05))[0]:
            return _told.append(gone.result()["type"])
    gone.cancel()
    await send({"type": "http.response.body", "body": b"end"})


class _Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        pass


async def _talk(
    *pieces: bytes, pause_s: float = 0.0, until: bytes = b"ok", times: int = 1, keep_alive_s: Any = 5
) -> bytes:
    """What a client is answered that sends these, until the server closes, or has said `until` so many times."""
    config = uvicorn.Config(
        _app,
        port=0,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_keep_alive=keep_alive_s,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
    answer = bytearray()

    async def listen() -> None:
        with contextlib.suppress(ConnectionResetError):  # what was closed with bytes unread
            while not (until and answer.endswith(until) and answer.count(until) >= times) and (
                data := await reader.read(65536)
            ):
                answer.extend(data)

    listening = asyncio.create_task(listen())
    for piece in pieces:
        if not listening.done():  # who writes on to a closed connection loses what it was told
            writer.write(piece)
            await asyncio.sleep(pause_s)
    await asyncio.wait((listening,), timeout=100)
    listening.cancel()
    writer.close()
    server.should_exit = True
    await serving
    return bytes(answer)


def _code(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def test_a_silent_connection_is_closed(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    assert asyncio.run(_talk()) == b""


def test_a_head_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    drops = [b"GET / HTTP/1.1\r\nHost: x\r\n", *[b"x: y\r\n"] * 10]
    assert _code(asyncio.run(_talk(*drops, pause_s=0.1))) == (408, "head_timeout")


def test_a_head_without_bounds_is_refused():
    pieces = [b"GET / HTTP/1.1\r\nHost: x\r\nx: ", *[b"a" * 16384] * 8]
    assert _code(asyncio.run(_talk(*pieces, pause_s=0.02))) == (431, "head_too_large")


@pytest.mark.parametrize("lines", [1, 3000])
def test_a_head_that_comes_as_a_whole_has_the_same_bounds(lines):
    head = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"x: %s\r\n" % (b"a" * (90_000 // lines)) * lines + b"\r\n"
    assert _code(asyncio.run(_talk(head))) == (431, "head_too_large")
    long_path = b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    assert _code(asyncio.run(_talk(long_path))) == (431, "head_too_large")


@pytest.mark.parametrize("keep_alive_s, closes", [(0.1, True), (100, False)])
def test_an_idle_connection_waits_for_as_long_as_it_may(monkeypatch, keep_alive_s, closes):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    talk = _talk(GET, GET, pause_s=0.8, until=b"\r\n\r\nok", times=2, keep_alive_s=keep_alive_s)
    assert asyncio.run(talk).count(b"200 OK") == (1 if closes else 2)


@pytest.mark.parametrize(
    "request_",
    [b"\x16\x03\x01\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n"],
)
def test_what_is_no_http_is_refused_in_openais_shape(request_):
    assert _code(asyncio.run(_talk(request_ + b"\r\n\r\n"))) == (400, "invalid_http")


def test_requests_one_after_the_other_and_in_pieces_are_served():
    one = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"b" * 100_000
    assert asyncio.run(_talk(one[:10], one[10:60], one[60:70_000], one[70_000:], pause_s=0.1)).endswith(b"ok")
    get = b"GET / HTTP/1.1\r\nHost: x\r\n"
    answer = asyncio.run(_talk(get + b"\r\n" + get + b"\r\n" + get + b"Connection: close\r\n\r\n", until=b""))
    assert answer.count(b"200 OK") == 3


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("method, body", [(b"GET", b"word " * 20 + b"end"), (b"HEAD", b"")])
def test_http_1_0_gets_no_chunks(method, body):
    head, _, rest = asyncio.run(_talk(method + b" /stream HTTP/1.0\r\n\r\n", until=b"")).partition(b"\r\n\r\n")
    assert b"200 OK" in head and b"chunked" not in head and b"connection: close" in head and rest == body
    assert asyncio.run(_talk(b"GET / HTTP/1.0\r\n\r\n", until=b"")).endswith(
        b"content-length: 2\r\nconnection: close\r\n\r\nok"
    )


@pytest.mark.parametrize(
    "pieces",
    [(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", b"b", b"b"), (GET, b"\r\n")],
    ids=["a body's bytes", "empty lines"],
)
def test_nothing_that_follows_an_answer_holds_the_connection(monkeypatch, pieces):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    assert asyncio.run(_talk(*pieces, pause_s=0.1, until=b"")).count(b"200 OK") == 1


def test_a_second_head_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    answer = asyncio.run(_talk(GET, GET[:20], pause_s=0.1, until=b""))
    assert answer.startswith(b"HTTP/1.1 200") and _code(answer.partition(b"ok")[2])[1] == "head_timeout"


@pytest.mark.parametrize(
    "next_", [(b"\x16\x03\r\n",), (GET[:16] + b"x: ", b"a" * 70_000)], ids=["no http", "too large"]
)
def test_refusals_never_come_amid_an_answer(next_):
    answer = asyncio.run(_talk(STREAM, *next_, pause_s=0.1, until=b""))
    assert answer.count(b"HTTP/1.1") == 1 and answer.endswith(b"word \r\n")


def test_a_broken_body_is_refused():
    chunked = b"POST /stream HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n"
    assert _code(asyncio.run(_talk(chunked + b"hello\r\n", b"no size\r\n", pause_s=0.05))) == (400, "invalid_http")


def test_the_bound_is_on_each_head_alone():
    requests = (GET[:-2] + b"x: " + b"y" * 900 + b"\r\n\r\n") * 120
    pieces = [requests[at : at + 50_000] for at in range(0, len(requests), 50_000)]
    answer = asyncio.run(_talk(*pieces, STREAM, pause_s=0.01, until=b"end\r\n0\r\n\r\n"))
    assert answer.count(b"200 OK") == 121


def test_who_leaves_is_missed_by_each_request_that_was_sent():
    _told.clear()
    asyncio.run(_talk(STREAM + GET, pause_s=0.1, until=b"word \r\n"))
    assert _told == ["http.disconnect"]


def test_the_server_takes_as_many_connections_as_the_system_allows():
    script = (
        "import resource; from eprt.serve.http.connection import raise_descriptor_limit as r; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512)); r(); print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(512, 512)"
