"""RankConnection: one rank's byte stream, as the frontend reads it. Knows nothing of what the messages mean."""

import asyncio
import logging
from typing import Protocol

from eprt.serve.ranks import messages as msg
from eprt.serve.ranks.rank import Rank

_log = logging.getLogger(__name__)

# A connection that sends this many bytes without a Hello is not a rank's.
_MAX_HELLO_BYTES = 4096
# A rank says Hello as soon as it is connected; whoever says nothing would keep a descriptor.
_HELLO_TIMEOUT_S = 30.0


class RankEvents(Protocol):
    """Who hears of the ranks."""

    def on_hello(self, hello: msg.Hello, transport: asyncio.Transport) -> Rank | None:
        """The rank; None where it was refused, and the connection closed."""
        ...

    def on_message(self, rank: Rank, message: msg.ToFrontend) -> None: ...

    def on_closed(self, rank: Rank | None, is_rank0: bool) -> None: ...


class RankConnection(asyncio.Protocol):
    """The first message must be a Hello. is_rank0: the connection is rank 0's, whatever it says."""

    def __init__(self, events: RankEvents, is_rank0: bool = False):
        self._events, self._is_rank0 = events, is_rank0
        self._unpacker = msg.Unpacker(msg.ToFrontend)
        self._rank: Rank | None = None
        self._num_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None  # of the Hello

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        if not self._is_rank0:
            self._deadline = asyncio.get_running_loop().call_later(_HELLO_TIMEOUT_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        try:
            for message in self._unpacker.add_bytes(data):
                if self._rank is not None:
                    self._events.on_message(self._rank, message)
                    continue
                if not isinstance(message, msg.Hello):
                    self._transport.abort()
                    return
                self._stop_waiting()
                self._rank = self._events.on_hello(message, self._transport)
                if self._rank is None:
                    return
        except (ValueError, RecursionError) as error:  # bytes that are not a message
            _log.warning("a connection sent %s", error)
            self._transport.abort()
            return
        if self._rank is None and self._num_bytes > _MAX_HELLO_BYTES:
            self._transport.abort()

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def connection_lost(self, exc) -> None:
        self._stop_waiting()
        self._events.on_closed(self._rank, self._is_rank0)
