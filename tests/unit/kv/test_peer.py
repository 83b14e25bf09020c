"""Pages of another GPU: which bytes arrive, by how many calls; and owners that are gone. Memory is the host's."""

import os

import numpy as np
import pytest
import torch

from eprt.kv import peer
from eprt.kv.page_runs import page_runs
from eprt.kv.peer import PeerReader, copies_of_part
from eprt.kv.reader import CachePart, open_reader
from tests.unit.kv.cases import fake_gpu, make_gpu_pages

SHAPES, NUM_PAGES = [(3, 9, 4, 12), (2, 9, 4, 10)], 9


@pytest.fixture
def gpu(monkeypatch):
    return fake_gpu(monkeypatch)


@pytest.fixture
def caches(gpu):
    theirs, mine = make_gpu_pages(SHAPES), make_gpu_pages(SHAPES)
    for part_LPB in theirs.bytes_LPB:
        part_LPB[:] = torch.from_numpy(np.random.default_rng(0).integers(0, 256, part_LPB.shape).astype(np.uint8))
    yield theirs, mine
    mine.close()


@pytest.mark.parametrize(
    "from_pages, to_pages, num_runs",
    [
        ([], [], 0),
        ([4], [0], 1),
        ([0, 1, 2, 3], [5, 6, 7, 8], 1),
        ([2, 1, 0], [3, 4, 5], 3),
        ([0, 1, 5, 6, 8], [1, 2, 3, 4, 0], 3),
        ([0, 2, 4, 6, 8, 7], [1, 0, 3, 2, 5, 7], 6),
    ],
)
@pytest.mark.parametrize("most_pitch", [1 << 20, 100])
def test_pages_arrive_where_they_shall_by_few_calls(
    caches, gpu, monkeypatch, from_pages, to_pages, num_runs, most_pitch
):
    monkeypatch.setattr(peer, "_MOST_PITCH", most_pitch)
    theirs, mine = caches
    reader = open_reader(theirs.source)
    assert isinstance(reader, PeerReader)
    reader.read_pages(from_pages, mine.bytes_LPB, to_pages)
    others = [page for page in range(NUM_PAGES) if page not in to_pages]
    for mine_LPB, theirs_LPB in zip(mine.bytes_LPB, theirs.bytes_LPB):
        assert torch.equal(mine_LPB[:, to_pages], theirs_LPB[:, from_pages])
        assert not mine_LPB[:, others].any()
    # One call for all layers of a run; one for each layer where these lie too far apart.
    assert len(gpu.copied) == num_runs * (2 if most_pitch > 100 else 3 + 2)
    assert mine.checksums(to_pages) == theirs.checksums(from_pages)
    assert len({*theirs.checksums(range(NUM_PAGES))}) == NUM_PAGES
    reader.close()
    theirs.close()


def test_all_copies_are_in_the_current_stream(caches, gpu):
    theirs, mine = caches
    reader, here = PeerReader(theirs.source), torch.cuda.current_stream()
    reader.read_pages([0, 2, 4, 6, 8], mine.bytes_LPB, [1, 2, 3, 4, 5])
    assert gpu.streams == [here.cuda_stream] * 10
    reader.close()
    theirs.close()


def test_a_copy_of_a_large_cache_has_a_row_for_each_layer(gpu):
    """DeepSeek-V3's width, 4096 tokens: 64 pages at worst, in 62 layers each."""
    part, num_into = CachePart(0, (62, 20000, 73728)), 25000
    (copy,) = copies_of_part(part, 1 << 40, num_into, 1 << 41, page_runs(range(10, 74), range(100, 164)))
    assert (copy.WidthInBytes, copy.Height) == (64 * 73728, 62)
    assert (copy.srcDevice, copy.srcPitch) == ((1 << 40) + 10 * 73728, 20000 * 73728)
    assert (copy.dstDevice, copy.dstPitch) == ((1 << 41) + 100 * 73728, num_into * 73728)
    scattered = page_runs(range(64), range(126, -2, -2))
    assert len([*copies_of_part(part, 1 << 40, num_into, 1 << 41, scattered)]) == 64
    # A layer of 30000 pages is 2.2 GB: more than a pitch may be.
    assert len([*copies_of_part(part, 1 << 40, 30000, 1 << 41, page_runs([3], [5]))]) == 62


def test_the_memory_of_an_owner_that_is_gone_stays_until_it_is_unmapped(caches, gpu):
    theirs, mine = caches
    source, want = theirs.source, [part.clone() for part in theirs.bytes_LPB]
    reader = PeerReader(source)
    theirs.close()  # as when its process ends
    reader.read_pages([1], mine.bytes_LPB, [0])
    assert all(torch.equal(part[:, 0], of[:, 1]) for part, of in zip(mine.bytes_LPB, want))
    num_mapped = len(gpu.mapped)
    reader.close()
    assert len(gpu.mapped) == num_mapped - 2
    with pytest.raises(OSError, match=f"the pages of process {os.getpid()} cannot be mapped on this GPU"):
        PeerReader(source)
    assert len(gpu.mapped) == num_mapped - 2 == len(gpu.ranges)


def test_memory_that_cannot_be_mapped_is_an_error_that_names_it(caches, gpu):
    theirs, _ = caches
    before = dict(gpu.ranges)
    gpu.fails = "cuMemImportFromShareableHandle"
    with pytest.raises(OSError, match="importing another process's GPU memory: out of memory"):
        PeerReader(theirs.source)
    assert gpu.ranges == before and not gpu.handles
    theirs.close()


def test_a_failed_copy_is_an_error_once_no_other_writes_into_the_pages(caches, gpu):
    theirs, mine = caches
    reader = PeerReader(theirs.source)
    gpu.fails = "cuMemcpy2DAsync"
    before = torch.cuda.current_stream().num_waits
    with pytest.raises(OSError, match=f"the pages of process {os.getpid()} cannot be read: copying pages"):
        reader.read_pages([0, 4], mine.bytes_LPB, [1, 3])
    assert torch.cuda.current_stream().num_waits == before + 1
    gpu.fails = ""
    with pytest.raises(ValueError, match="are not in a cache of 9"):
        reader.read_pages([9], mine.bytes_LPB, [0])
    reader.close()
    theirs.close()
