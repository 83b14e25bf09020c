"""Long bodies are held within a bound and read one after the other, beside the server's loop; what follows need not
wait."""

import asyncio
import json
import threading
import time
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from eprt.serve.errors import ApiError
from eprt.serve.http.api import Api
from eprt.serve.http.bodies import Bodies

BODY = json.dumps({"prompt": "x" * 30_000}).encode()


class _Pool:
    """Takes no request: here it ends where it would be submitted."""

    limits = None
    metrics = SimpleNamespace(observe_request=lambda *given: None)

    def check_open(self) -> None: ...

    def submit(self, sequences) -> None:
        raise ApiError(429, "enough", code="enough")


def _request(gone: bool = False, pieces: tuple[bytes, ...] = (BODY,), length: int | None = None) -> Request:
    """gone: its client has left by the time it is read. pieces: of its body, which may not be all. length: as told in
    the head."""
    messages = [{"type": "http.request", "body": piece, "more_body": i > 0} for i, piece in enumerate(pieces[::-1])]
    headers = [] if length is None else [(b"content-length", b"%d" % length)]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        if not gone:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "headers": headers, "eprt.request_id": "r"}, receive)


class _Work:
    """What is done of each body; reading takes a while, and two are prepared side by side."""

    def __init__(self):
        self.num_read = self.reading = self.most_reading = 0
        self.both = threading.Barrier(2)

    def read(self, body: bytes) -> bytes:
        self.reading += 1
        self.num_read, self.most_reading = self.num_read + 1, max(self.most_reading, self.reading)
        time.sleep(0.02)
        self.reading -= 1
        return body

    def prepare(self, body: bytes, *given) -> Any:
        self.both.wait(100)
        return SimpleNamespace(sequences=[])


def _generate(work: _Work, *gone: bool) -> list[Any]:
    """What becomes of requests that come at once; those marked have been given up by their clients."""

    async def run() -> list[Any]:
        options = SimpleNamespace(max_body_bytes=1 << 20, body_timeout_s=100)
        api = Api(options, _Pool(), *[None] * 3)  # type: ignore[arg-type]
        return await asyncio.gather(
            *(api._generate(_request(one), "chat", work.read, work.prepare) for one in gone), return_exceptions=True
        )

    return asyncio.run(run())


def test_bodies_are_read_one_after_the_other_and_prepared_side_by_side():
    work = _Work()
    assert [getattr(error, "code", error) for error in _generate(work, *[False] * 4)] == ["enough"] * 4
    assert (work.num_read, work.most_reading) == (4, 1)


def test_nobody_reads_the_body_of_a_client_that_has_left():
    work = _Work()
    first, gone, last = _generate(work, False, True, False)
    assert isinstance(gone, ClientDisconnect) and first.code == last.code == "enough"
    assert work.num_read == 2


@pytest.mark.parametrize("length", [None, 30_000], ids=["chunked", "with its length"])
def test_what_all_bodies_take_has_a_bound_that_short_ones_need_not_fear(monkeypatch, length):
    monkeypatch.setattr("eprt.serve.http.bodies._MOST_LARGEST", 2)

    async def run() -> None:
        bodies, halves = Bodies(max_bytes=40_000, timeout_s=100), (b"x" * 15_000, b"x" * 15_000)
        for _ in range(2):  # the second time after all were released
            async with AsyncExitStack() as held:
                for _ in range(2):
                    await held.enter_async_context(bodies.read(_request(pieces=halves, length=length)))
                await held.enter_async_context(bodies.read(_request(pieces=(b"x" * 15_000,))))
                with pytest.raises(ApiError, match=r"take [0-9]+ of 80000 bytes") as caught:
                    await held.enter_async_context(bodies.read(_request(pieces=halves, length=length)))
                assert (caught.value.status, caught.value.code) == (503, "too_many_bodies")
        for failing in (_request(pieces=(b"x" * 50_000,)), _request(pieces=halves[:1], length=50_000)):
            with pytest.raises(ApiError, match="larger than 40000 bytes"):
                async with bodies.read(failing):
                    pass
        assert bodies._reserved == 0

    asyncio.run(run())
