"""Pages read from a memfd of another process's: which bytes arrive, and when the source is gone."""

import os

import numpy as np
import pytest
import torch

from eprt.engine.cache_layout import allocate_kv_cache
from eprt.kv.pages import CachePages
from eprt.kv.reader import open_reader
from eprt.ops import native
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


@pytest.mark.parametrize("tokens", [1, 3, 5, 64])
def test_all_instruction_sets_copy_and_sum_alike(tokens):
    """Pages of bytes that fill no vector, and begin anywhere."""
    entry, widest, sums = KVFormat(tokens, 2, torch.bfloat16), native.isa(), []
    theirs, mine = CachePages(), CachePages()
    for made in (theirs, mine):
        allocate_kv_cache(2, 5, 3, entry, "cpu", made)
    theirs.bytes_LPB[0][:] = np.random.default_rng(tokens).integers(0, 256, theirs.bytes_LPB[0].shape)
    reader = open_reader(theirs.source)
    try:
        for isa in native.ISA_NAMES[: native.ISA_NAMES.index(widest) + 1]:
            native.set_isa(isa)
            mine.bytes_LPB[0][:] = 0
            reader.read_pages([4, 0, 2], mine.bytes_LPB, [1, 2, 4])
            assert (mine.bytes_LPB[0][:, [1, 2, 4]] == theirs.bytes_LPB[0][:, [4, 0, 2]]).all()
            assert not mine.bytes_LPB[0][:, [0, 3]].any()
            sums.append([theirs.checksum(page) for page in range(5)])
    finally:
        native.set_isa(widest)
    assert all(each == sums[0] for each in sums) and len(set(sums[0])) == 5


def test_every_flipped_bit_and_every_swapped_word_is_found(caches):
    cache, rng = caches[0], np.random.default_rng(1)
    part_LPB = cache.bytes_LPB[0]
    words = part_LPB[1, 5].view(np.uint64)
    before = cache.checksum(5)
    for bit in range(8 * part_LPB.shape[2]):
        part_LPB[1, 5, bit // 8] ^= 1 << bit % 8
        assert cache.checksum(5) != before, f"bit {bit}"
        part_LPB[1, 5, bit // 8] ^= 1 << bit % 8
    for _ in range(200):
        one, other = rng.choice(len(words), 2, replace=False)
        words[[one, other]] = words[[other, one]]
        assert cache.checksum(5) != before, f"words {one} and {other}"
        words[[one, other]] = words[[other, one]]
    assert cache.checksum(5) == before


@pytest.mark.parametrize("from_pages, to_pages", [([9], [0]), ([-1], [0]), ([0], [9]), ([0], [-1])])
def test_pages_that_no_cache_has_are_refused(caches, from_pages, to_pages):
    theirs, mine = caches
    reader = open_reader(theirs.source)
    with pytest.raises(ValueError, match="are not in a cache of 9"):
        reader.read_pages(from_pages, mine.bytes_LPB, to_pages)


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
