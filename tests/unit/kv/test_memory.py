"""Pages read from a memfd of another process's: which bytes arrive, and when the source is gone."""

import os

import numpy as np
import pytest
import torch

from eprt.engine.cache_layout import allocate_kv_cache
from eprt.kv.pages import CachePages
from eprt.kv.reader import open_reader
from eprt.ops.index_format import IndexFormat
from eprt.ops.kv_format import KVFormat

LATENT, INDEX = KVFormat(8, 4, torch.bfloat16), IndexFormat(8, torch.bfloat16)


@pytest.fixture
def caches() -> list[CachePages]:
    made = []
    for _ in range(2):
        made.append(CachePages())
        for entry in (LATENT, INDEX):
            allocate_kv_cache(3, 9, 4, entry, "cpu", made[-1])
    for part_LPB in made[0].bytes_LPB:
        part_LPB[:] = np.random.default_rng(0).integers(0, 256, part_LPB.shape)
    return made


@pytest.mark.parametrize(
    "from_pages, to_pages",
    [([], []), ([4], [0]), ([0, 1, 2], [3, 4, 5]), ([2, 1, 0], [3, 4, 5]), ([0, 1, 5, 6, 8], [1, 2, 3, 4, 0])],
)
def test_pages_arrive_where_they_shall_and_nowhere_else(caches, from_pages, to_pages):
    theirs, mine = caches
    reader = open_reader(theirs.source)
    reader.read_pages(from_pages, mine.bytes_LPB, to_pages)
    others = [page for page in range(9) if page not in to_pages]
    for mine_LPB, theirs_LPB in zip(mine.bytes_LPB, theirs.bytes_LPB):
        assert (mine_LPB[:, to_pages] == theirs_LPB[:, from_pages]).all()
        assert not mine_LPB[:, others].any()
    assert [mine.checksum(page) for page in to_pages] == [theirs.checksum(page) for page in from_pages]
    reader.close()


def test_a_checksum_depends_on_every_byte_and_its_layer(caches):
    cache = caches[0]
    before = cache.checksum(5)
    for part_LPB in cache.bytes_LPB:
        for layer, at in ((0, 0), (1, 7), (2, -1)):
            part_LPB[layer, 5, at] ^= 4
            assert cache.checksum(5) != before
            part_LPB[layer, 5, at] ^= 4
    assert cache.checksum(5) == before
    part_LPB = cache.bytes_LPB[0]
    part_LPB[[0, 1], 5] = part_LPB[[1, 0], 5]
    assert cache.checksum(5) != before


def test_owners_are_never_the_same_twice(caches):
    assert caches[0].source.owner != caches[1].source.owner
    assert caches[0].source.fits(caches[1].source)
    assert caches[0].num_bytes == 3 * 9 * 4 * (12 + 8) * 2


def test_a_mapping_outlives_its_owner_and_a_gone_owner_is_named(caches):
    theirs, mine = caches
    reader = open_reader(theirs.source)
    for part in theirs.source.parts:
        os.close(part.fd)
    reader.read_pages([1], mine.bytes_LPB, [0])
    assert (mine.bytes_LPB[1][:, 0] == theirs.bytes_LPB[1][:, 1]).all()
    with pytest.raises(OSError, match=f"/proc/{os.getpid()}/fd/"):
        open_reader(theirs.source)
