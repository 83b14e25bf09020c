"""Bodies are read within bounds: on each one, and on the memory of all long ones together."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from eprt.serve.errors import ApiError
from eprt.serve.http.bodies import Bodies
from tests.unit.serve.http.cases import make_request


@pytest.mark.parametrize("length", [None, 30_000], ids=["chunked", "with its length"])
def test_what_all_bodies_take_has_a_bound_that_short_ones_need_not_fear(monkeypatch, length):
    monkeypatch.setattr("eprt.serve.http.bodies._MOST_LARGEST", 2)

    async def run() -> None:
        bodies, halves = Bodies(max_bytes=40_000, timeout_s=100), (b"x" * 15_000, b"x" * 15_000)
        for _ in range(2):  # the second time after all were released
            async with AsyncExitStack() as held:
                for _ in range(2):
                    await held.enter_async_context(bodies.read(make_request(pieces=halves, length=length)))
                await held.enter_async_context(bodies.read(make_request(pieces=(b"x" * 15_000,))))
                with pytest.raises(ApiError, match=r"take [0-9]+ of 80000 bytes") as caught:
                    await held.enter_async_context(bodies.read(make_request(pieces=halves, length=length)))
                assert (caught.value.status, caught.value.code) == (503, "too_many_bodies")
        for failing in (make_request(pieces=(b"x" * 50_000,)), make_request(pieces=halves[:1], length=50_000)):
            with pytest.raises(ApiError, match="larger than 40000 bytes"):
                async with bodies.read(failing):
                    pass
        assert bodies._reserved == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    "request_, status, code",
    [
        (make_request(length=1 << 30), 413, "body_too_large"),
        (make_request(pieces=(b"x" * 60, b"x" * 60)), 413, "body_too_large"),
        (make_request(pieces=(b"{",), length=50, ends=False), 408, "body_timeout"),
        (make_request(encoding=b"gzip"), 415, "unsupported_encoding"),
    ],
    ids=["by its length", "as it comes", "without an end", "compressed"],
)
def test_a_body_that_cannot_be_read_is_refused(request_, status, code):
    async def read() -> None:
        bodies = Bodies(max_bytes=100, timeout_s=0)
        with pytest.raises(ApiError) as caught:
            async with bodies.read(request_):
                pass
        assert (caught.value.status, caught.value.code) == (status, code) and bodies._reserved == 0

    asyncio.run(read())
