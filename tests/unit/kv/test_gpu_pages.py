"""A GPU's cache that others can read: what it tells, its sums, and what is left of it. Memory is the host's."""

import os

import msgspec
import pytest
import torch

from eprt.kv import gpu_pages
from eprt.kv.reader import PageSource, open_reader, this_host
from tests.unit.kv.cases import fake_gpu, make_gpu_pages

SHAPES = [(3, 9, 4, 12)]


@pytest.fixture
def gpu(monkeypatch):
    return fake_gpu(monkeypatch)


def test_what_others_are_told(gpu):
    one, other = make_gpu_pages(SHAPES), make_gpu_pages([*SHAPES, (2, 9, 4, 10)])
    source = one.source
    assert (source.reader, source.pid, source.host, source.address) == ("peer", os.getpid(), this_host(), None)
    assert source.owner != other.source.owner and source.desk != other.source.desk
    assert [part.shape for part in other.source.parts] == [(3, 9, 4 * 12 * 2), (2, 9, 4 * 10 * 2)]
    assert source.fits(one.source) and not source.fits(other.source)
    assert other.num_bytes == (3 * 12 + 2 * 10) * 9 * 4 * 2 == sum(part.numel() for part in other.bytes_LPB)
    assert msgspec.json.decode(msgspec.json.encode(source), type=PageSource) == source
    for cache in (one, other):
        cache.close()
    assert gpu.is_empty()


def test_other_hosts_cannot_read_it(gpu):
    cache = make_gpu_pages(SHAPES)
    with pytest.raises(ValueError, match="--page-reader tcp: pages of GPUs are read on their own host only"):
        cache.open_to_hosts("0.0.0.0", "tcp")
    with pytest.raises(ValueError, match="lie in the memory of another host"):
        open_reader(msgspec.structs.replace(cache.source, host="another"))
    cache.close()


def test_sums_of_more_pages_than_one_launch_takes(gpu, monkeypatch):
    cache = make_gpu_pages(SHAPES)
    cache.bytes_LPB[0][:] = torch.arange(cache.bytes_LPB[0].numel()).view(cache.bytes_LPB[0].shape) % 251
    together = cache.checksums(range(9))
    monkeypatch.setattr(gpu_pages, "_AT_ONCE", 2)
    assert cache.checksums(range(9)) == together and cache.checksums([]) == []
    assert cache.checksums([7, 2]) == [together[7], together[2]]
    cache.bytes_LPB[0][2, 7, -1] ^= 1
    assert cache.checksums([7]) != [together[7]]
    cache.close()


def test_what_a_thread_does_first(gpu):
    cache = make_gpu_pages(SHAPES)
    cache.enter_thread()  # the context and the stream of copies
    cache.after_steps()()
    cache.close()


def test_a_gpu_without_room_leaves_nothing(gpu):
    cache = make_gpu_pages([])
    gpu.fails = "cuMemCreate"
    with pytest.raises(RuntimeError, match="GPU memory: out of memory"):
        cache.allocate_part(SHAPES[0], torch.bfloat16)
    cache.close()
    assert gpu.is_empty()
