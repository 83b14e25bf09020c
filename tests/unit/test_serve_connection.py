"""What a client does to the head of a request ends in a refusal or a closed connection, never in one held for good."""

import asyncio
import json
import subprocess
import sys

import pytest
import uvicorn

from eprt.serve import connection
from eprt.serve.connection import Connection


async def _app(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


class _Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        pass


async def _talk(*pieces: bytes, pause_s: float = 0.0, until: bytes = b"ok") -> bytes:
    """What a client is answered that sends these, until the server closes or has said `until`."""
    config = uvicorn.Config(_app, port=0, http=Connection, ws="none", lifespan="off", log_config=None)
    server = _Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
    answer = bytearray()

    async def listen() -> None:
        while not (until and answer.endswith(until)) and (data := await reader.read(65536)):
            answer.extend(data)

    listening = asyncio.create_task(listen())
    for piece in pieces:
        if not listening.done():  # who writes on to a closed connection loses what it was told
            writer.write(piece)
            await asyncio.sleep(pause_s)
    await asyncio.wait_for(listening, 5)
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


@pytest.mark.parametrize(
    "request_",
    [b"\x16\x03\x01\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n"],
)
def test_what_is_no_http_is_refused_in_openais_shape(request_):
    assert _code(asyncio.run(_talk(request_ + b"\r\n\r\n"))) == (400, "invalid_http")


def test_requests_one_after_the_other_and_in_pieces_are_served(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.5)
    one = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"b" * 100_000
    assert asyncio.run(_talk(one[:10], one[10:60], one[60:70_000], one[70_000:], pause_s=0.1)).endswith(b"ok")
    get = b"GET / HTTP/1.1\r\nHost: x\r\n"
    answer = asyncio.run(_talk(get + b"\r\n" + get + b"\r\n" + get + b"Connection: close\r\n\r\n", until=b""))
    assert answer.count(b"200 OK") == 3


def test_the_server_takes_as_many_connections_as_the_system_allows():
    script = (
        "import resource; from eprt.serve.connection import raise_descriptor_limit as r; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512)); r(); print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(512, 512)"
