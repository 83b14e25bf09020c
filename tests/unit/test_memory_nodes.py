"""Memory policies of this process for real, and where memory lies, read from made-up and real numa_maps."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from eprt import memory_nodes
from eprt.memory_nodes import own_memory, prefer_nodes, preferred_nodes

NUMA_MAPS = """\
55d0c0000000 prefer:1 file=/usr/bin/python3.12 mapped=600 mapmax=9 N0=600 kernelpagesize_kB=4
55d0c1000000 prefer:1 heap anon=300 dirty=300 N0=100 N1=200 kernelpagesize_kB=4
7f0000000000 prefer:1 anon=1024 dirty=1024 active=0 N1=1024 kernelpagesize_kB=4
7f1000000000 prefer:1 file=/memfd:eprt\\040(deleted) anon=7 dirty=7 N0=7 kernelpagesize_kB=4
7f2000000000 prefer:1 huge anon=2 dirty=2 N10=2 kernelpagesize_kB=2048
7ffd00000000 default stack anon=4 dirty=4 N1=4
7ffd10000000 default
"""


def test_own_memory_is_anonymous_memory_by_node(tmp_path):
    (tmp_path / "numa_maps").write_text(NUMA_MAPS)
    pages = {0: 100 * 4096, 1: (200 + 1024 + 4) * 4096, 10: 2 * 2048 * 1024}
    assert own_memory(tmp_path / "numa_maps") == pages
    assert own_memory(tmp_path / "none") == {}


def policies_work() -> bool:
    try:
        preferred_nodes()
    except OSError:
        return False
    return os.path.isdir("/sys/devices/system/node/node0")


@pytest.mark.skipif(not policies_work(), reason="the kernel refuses memory policies here")
def test_threads_take_memory_from_the_nodes_of_the_thread_that_started_them():
    """In a thread of its own, whose policy ends with it."""

    def in_thread(function):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function).result()

    def prefer_then(function):
        prefer_nodes([0])
        return function()

    before = preferred_nodes()
    assert in_thread(lambda: prefer_then(preferred_nodes)) == (0,)
    assert in_thread(lambda: prefer_then(lambda: in_thread(preferred_nodes))) == (0,)
    assert preferred_nodes() == before
    found = own_memory()
    assert not found or sum(found.values()) > 1 << 20


@pytest.mark.skipif(not policies_work(), reason="the kernel refuses memory policies here")
def test_a_node_that_is_not_there_is_refused():
    errors = []

    def prefer():
        try:
            prefer_nodes([900])
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=prefer)
    thread.start()
    thread.join()
    assert [error.strerror for error in errors] == ["Invalid argument"]


def test_another_architecture_is_refused(monkeypatch):
    monkeypatch.setattr(memory_nodes.platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="unknown on riscv64"):
        preferred_nodes()
