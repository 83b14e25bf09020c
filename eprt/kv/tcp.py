"""The reader `tcp`: asks the KVPageServer of another host for pages, over one connection.

The bytes go straight into their pages. An answer that breaks off leaves nothing behind that could be written later.
"""

import contextlib
import socket
import time
from collections.abc import Sequence

import numpy as np

from eprt.dead_host import notice_dead_host
from eprt.handshake import HandshakeError, introduce
from eprt.kv.page_server import PAGES, PATIENCE_S, QUESTION
from eprt.kv.pieces import page_pieces, receive_pieces
from eprt.kv.reader import PageReader, PageSource, check_pages


class PageConnection:
    """To the KVPageServer of a source. OSError where that cannot be reached, or does not know the source's owner."""

    def __init__(self, source: PageSource):
        host, port = source.address or ("", 0)
        if not host or not port:
            raise OSError(f"process {source.pid} has not said where its pages can be read from other hosts")
        try:
            self.sock = socket.create_connection((host, port), timeout=PATIENCE_S)
        except OSError as error:
            raise _unreachable(source, error) from None
        try:
            introduce(self.sock, source.owner.encode(), {}, time.monotonic() + PATIENCE_S)
        except HandshakeError:
            self.close()
            raise OSError(f"{host}:{port} has not the pages of process {source.pid} any more") from None
        except OSError as error:
            self.close()
            raise _unreachable(source, error) from None
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_dead_host(self.sock)
        self.sock.settimeout(PATIENCE_S)

    def ask(self, kind: int, pages: Sequence[int] = ()) -> None:
        self.sock.sendall(QUESTION.pack(kind, len(pages)) + np.array(pages, dtype="<u4").tobytes())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()


def _unreachable(source: PageSource, error: OSError) -> OSError:
    assert source.address is not None, "asked for by the caller"
    host, port = source.address
    return OSError(f"the pages of process {source.pid} cannot be read at {host}:{port}: {error}")


class TcpReader(PageReader):
    """Connects with the first pages, and anew after an error."""

    def __init__(self, source: PageSource):
        self._source = source
        self._connection: PageConnection | None = None

    def read_pages(self, from_pages: Sequence[int], into_LPB: Sequence[np.ndarray], to_pages: Sequence[int]) -> None:
        check_pages(self._source, from_pages, into_LPB, to_pages)
        if not from_pages:
            return
        if self._connection is None:
            self._connection = PageConnection(self._source)
        try:
            self._connection.ask(PAGES, from_pages)
            receive_pieces(self._connection.sock, page_pieces(into_LPB, to_pages))
        except OSError as error:
            self.close()
            raise _unreachable(self._source, error) from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
