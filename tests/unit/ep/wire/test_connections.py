"""PeerConnections among threads: every pair is connected once per proxy thread, whoever else is at the ports."""

import contextlib
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from eprt.ep.wire.connections import PeerConnections

PATIENCE_S = 100.0
KEY = b"k"


def make(rank: int, size: int, num_threads: int) -> PeerConnections:
    return PeerConnections("127.0.0.1", rank, [peer for peer in range(size) if peer != rank], num_threads, KEY)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_every_pair_is_connected_amid_strangers(size):
    num_threads = 2
    ranks = [make(rank, size, num_threads) for rank in range(size)]
    addresses = [one.address for one in ranks]
    with contextlib.ExitStack() as strangers, ThreadPoolExecutor(size) as pool:
        for address in addresses:
            for garbage in (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n"):
                strangers.enter_context(socket.create_connection(address)).sendall(garbage)
        found = list(pool.map(lambda one: one.connect_all(list(addresses), PATIENCE_S), ranks))
    for rank, descriptors in enumerate(found):
        for thread in range(num_threads):
            assert descriptors[thread][rank] == -1
            for peer in range(size):
                if peer > rank:
                    os.write(descriptors[thread][peer], b"%d%d%d" % (thread, rank, peer))
    for rank, descriptors in enumerate(found):
        for thread in range(num_threads):
            for peer in range(rank):
                with socket.socket(fileno=descriptors[thread][peer]) as sock:
                    sock.settimeout(PATIENCE_S)
                    assert sock.recv(10) == b"%d%d%d" % (thread, peer, rank)
            for peer in range(rank + 1, size):
                os.close(descriptors[thread][peer])


def test_who_does_not_connect_is_named():
    first = make(0, 4, 1)
    with pytest.raises(ConnectionError, match=r"\[rank 0\] ranks 1, 2, 3 did not connect within 0.1 s"):
        first.connect_all([first.address, None, None, None], 0.1)
