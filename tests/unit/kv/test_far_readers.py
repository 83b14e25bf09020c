"""Pages read from a KVPageServer, by each reader of other hosts: which bytes arrive, and what can go wrong."""

import importlib.util
import socket
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from eprt.engine.cache_layout import allocate_kv_cache
from eprt.kv.page_server import QUESTION, KVPageServer
from eprt.kv.pages import CachePages
from eprt.kv.reader import FAR_READERS, PageReader, PageSource, open_reader
from eprt.kv.tcp import PageConnection, TcpReader
from eprt.ops.index_format import IndexFormat
from eprt.ops.kv_format import KVFormat

HAS_NIXL = any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu13", "nixl_cu12"))
READERS = [
    "tcp",
    pytest.param("nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="the extra nixl is not installed")),
]


def make_cache() -> CachePages:
    cache = CachePages()
    for entry in (KVFormat(8, 4, torch.bfloat16), IndexFormat(8, torch.bfloat16)):
        allocate_kv_cache(3, 9, 4, entry, "cpu", cache)
    return cache


def seen_from_afar(cache: CachePages) -> PageSource:
    """As a reader of another host is told of it."""
    address = cache.source.address
    assert address is not None
    return msgspec.structs.replace(cache.source, host="another", address=("127.0.0.1", address[1]))


@pytest.fixture(params=READERS)
def far(request) -> Iterator[tuple[CachePages, CachePages, PageReader]]:
    """A cache that is read from afar, the one that reads, and its reader."""
    theirs, mine = make_cache(), make_cache()
    for part_LPB in theirs.bytes_LPB:
        part_LPB[:] = np.random.default_rng(0).integers(0, 256, part_LPB.shape)
    theirs.open_to_hosts("127.0.0.1", request.param)
    reader = open_reader(seen_from_afar(theirs))
    yield theirs, mine, reader
    reader.close()


def test_pages_arrive_where_they_shall_and_nowhere_else(far):
    theirs, mine, reader = far
    for from_pages, to_pages in (([], []), ([4], [0]), ([2, 1, 0], [3, 4, 5]), ([0, 1, 5, 6, 8], [1, 2, 3, 4, 0])):
        for part_LPB in mine.bytes_LPB:
            part_LPB[:] = 0
        reader.read_pages(from_pages, mine.bytes_LPB, to_pages)
        others = [page for page in range(9) if page not in to_pages]
        for mine_LPB, theirs_LPB in zip(mine.bytes_LPB, theirs.bytes_LPB):
            assert (mine_LPB[:, to_pages] == theirs_LPB[:, from_pages]).all()
            assert not mine_LPB[:, others].any()
        assert [mine.checksum(page) for page in to_pages] == [theirs.checksum(page) for page in from_pages]


def test_every_bit_that_flips_on_the_way_is_found(far):
    theirs, mine, reader = far
    rng = np.random.default_rng(2)
    for _ in range(40):
        page, part = rng.integers(9), theirs.bytes_LPB[rng.integers(2)]
        before = theirs.checksum(page)
        place = rng.integers(3), page, rng.integers(part.shape[2])
        part[place] ^= 1 << rng.integers(8)
        reader.read_pages([page], mine.bytes_LPB, [page])
        assert mine.checksum(page) != before
        assert mine.checksum(page) == theirs.checksum(page), "what is sent is what is there"


def test_a_reader_goes_on_after_an_error(far):
    theirs, mine, reader = far
    reader.read_pages([1], mine.bytes_LPB, [1])
    reader.close()
    reader.read_pages([7], mine.bytes_LPB, [2])
    assert mine.checksum(2) == theirs.checksum(7)


@pytest.mark.parametrize("from_pages, to_pages", [([9], [0]), ([-1], [0]), ([0], [9])])
def test_pages_that_no_cache_has_are_refused(far, from_pages, to_pages):
    _, mine, reader = far
    with pytest.raises(ValueError, match="are not in a cache of 9"):
        reader.read_pages(from_pages, mine.bytes_LPB, to_pages)


def test_a_process_of_the_same_host_reads_its_memory():
    cache = make_cache()
    cache.open_to_hosts("127.0.0.1", "tcp")
    assert cache.source.reader == "tcp"
    assert type(open_reader(cache.source)).__name__ == "MemoryReader"


def test_memory_of_another_host_is_refused():
    source = msgspec.structs.replace(make_cache().source, host="another")
    with pytest.raises(ValueError, match="lie in the memory of another host"):
        open_reader(source)


def test_who_does_not_know_the_owner_reads_nothing():
    cache = make_cache()
    cache.open_to_hosts("127.0.0.1", "tcp")
    stranger = msgspec.structs.replace(seen_from_afar(cache), owner="1-00")
    with pytest.raises(OSError, match=f"has not the pages of process {stranger.pid} any more"):
        TcpReader(stranger).read_pages([0], make_cache().bytes_LPB, [0])


def test_a_source_without_an_address_is_named():
    source = msgspec.structs.replace(make_cache().source, host="another", reader="tcp")
    with pytest.raises(OSError, match="has not said where its pages can be read"):
        TcpReader(source).read_pages([0], make_cache().bytes_LPB, [0])


def test_a_source_that_is_gone_is_named():
    cache = make_cache()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    source = msgspec.structs.replace(cache.source, host="another", reader="tcp", address=("127.0.0.1", port))
    with pytest.raises(OSError, match=f"cannot be read at 127.0.0.1:{port}: .*refused"):
        TcpReader(source).read_pages([0], cache.bytes_LPB, [0])


def test_an_answer_that_breaks_off_is_an_error():
    """The source is killed while it sends."""
    mine, owner = make_cache(), "1-aa"
    server = KVPageServer(
        [np.zeros((3, 9, 96), dtype=np.uint8)], "127.0.0.1", owner
    )  # sends less than the reader wants
    parts = mine.source.parts
    source = PageSource("tcp", owner, 1, parts, "another", ("127.0.0.1", server.port))
    reader = TcpReader(source)
    reader.read_pages([], mine.bytes_LPB, [])
    connection = reader._connection = PageConnection(source)
    threading.Timer(0.2, connection.sock.shutdown, (socket.SHUT_RDWR,)).start()
    with pytest.raises(OSError, match="the other end closed the connection"):
        reader.read_pages([0], mine.bytes_LPB, [0])
    assert reader._connection is None, "what may still come is not read as an answer to the next question"
    server.close()


@pytest.mark.parametrize(
    "question", [QUESTION.pack(0, 1) + b"\xff\xff\xff\xff", QUESTION.pack(1, 0), QUESTION.pack(7, 0)]
)
def test_a_server_ends_a_connection_that_asks_nonsense(question):
    cache = make_cache()
    cache.open_to_hosts("127.0.0.1", "tcp")
    connection = PageConnection(seen_from_afar(cache))
    connection.sock.sendall(question)
    assert connection.sock.recv(1) == b""
    connection.close()


def test_the_readers_of_other_hosts_have_names():
    assert FAR_READERS == ("tcp", "nixl")
