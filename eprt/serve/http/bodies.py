"""Bodies: reads requests' bodies within bounds: each one's size and time, and what all take together until their
requests are with the ranks. Without that bound many clients with large bodies would take all memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from eprt.serve.errors import ApiError, unavailable

# Bodies of the largest size allowed that may be held at once.
_MOST_LARGEST = 64
# Shorter ones are always let in: they are read faster than they come, and a few clients with large ones must not keep
# out everybody.
LONG_BODY = 20_000


class Bodies:
    def __init__(self, max_bytes: int, timeout_s: float):
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._held = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body, held until the context ends. Raises ApiError, and ClientDisconnect when the client leaves."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise ApiError(415, f"content-encoding {encoding!r}: send the body as it is", code="unsupported_encoding")
        body, held = bytearray(), 0
        try:
            held = self._hold(int(request.headers.get("content-length") or 0), held)
            try:
                async with asyncio.timeout(self._timeout_s):
                    async for chunk in request.stream():
                        body += chunk
                        held = self._hold(len(body), held)
            except TimeoutError:
                what = f"{len(body)} bytes of the body came within {self._timeout_s:g} s, but not its end"
                raise ApiError(408, f"{what}; --body-timeout S waits longer", code="body_timeout") from None
            whole = bytes(body)
            body.clear()
            yield whole
        finally:
            self._held -= held

    def _hold(self, num_bytes: int, held: int) -> int:
        """Makes room for a body of at least num_bytes, which already has `held`; returns what it has then."""
        if num_bytes > self._max_bytes:
            what = f"the body is larger than {self._max_bytes} bytes"
            raise ApiError(413, f"{what}; --max-body-mb raises the limit", code="body_too_large")
        more = max(0, num_bytes - held)
        most = _MOST_LARGEST * self._max_bytes
        if more and num_bytes >= LONG_BODY and self._held + more > most:
            what = f"requests that are being read take {self._held} of {most} bytes"
            raise unavailable(f"{what}; try again later", code="too_many_bodies", retry_after_s=1)
        self._held += more
        return held + more
