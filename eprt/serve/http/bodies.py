"""Bodies: reads requests' bodies within bounds: on the size and time of each, and on the memory of all together.

A body counts until its request is with the ranks. Without these bounds many clients with large bodies would take all
memory. Knows nothing of what a body says.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from eprt.serve.errors import ApiError, unavailable

# How many bodies of the largest size may be held at once.
_MOST_LARGEST = 64
# Shorter bodies are always read: they are processed faster than they arrive, and a few clients with large bodies must
# not lock out all others.
LONG_BODY = 20_000


class Bodies:
    """Reads bodies of at most max_bytes, each of which must arrive within timeout_s."""

    def __init__(self, max_bytes: int, timeout_s: float):
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._reserved = 0  # bytes, of all bodies that are being read

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body, held until the context ends. Raises ApiError, and ClientDisconnect when the client leaves."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise ApiError(415, f"content-encoding {encoding!r}: send the body as it is", code="unsupported_encoding")
        body, reserved = bytearray(), 0
        try:
            reserved = self._reserve(int(request.headers.get("content-length") or 0), reserved)
            try:
                async with asyncio.timeout(self._timeout_s):
                    async for chunk in request.stream():
                        body += chunk
                        reserved = self._reserve(len(body), reserved)
            except TimeoutError:
                what = f"{len(body)} bytes of the body came within {self._timeout_s:g} s, but not its end"
                raise ApiError(408, f"{what}; --body-timeout S waits longer", code="body_timeout") from None
            whole = bytes(body)
            body.clear()
            yield whole
        finally:
            self._reserved -= reserved

    def _reserve(self, num_bytes: int, reserved: int) -> int:
        """Reserves room for a body of at least num_bytes, which has `reserved` already; returns what it has then."""
        if num_bytes > self._max_bytes:
            what = f"the body is larger than {self._max_bytes} bytes"
            raise ApiError(413, f"{what}; --max-body-mb raises the limit", code="body_too_large")
        more = max(0, num_bytes - reserved)
        most = _MOST_LARGEST * self._max_bytes
        if more and num_bytes >= LONG_BODY and self._reserved + more > most:
            what = f"requests that are being read take {self._reserved} of {most} bytes"
            raise unavailable(f"{what}; try again later", code="too_many_bodies", retry_after_s=1)
        self._reserved += more
        return reserved + more
