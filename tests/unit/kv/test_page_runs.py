"""Pages side by side on both sides become one copy, whatever their order."""

import numpy as np
import pytest

from eprt.kv.page_runs import page_runs


@pytest.mark.parametrize(
    "from_pages, to_pages, runs",
    [
        ([], [], []),
        ([4], [0], [(4, 0, 1)]),
        ([0, 1, 2], [5, 6, 7], [(0, 5, 3)]),
        ([2, 1, 0], [7, 6, 5], [(0, 5, 3)]),
        ([2, 1, 0], [5, 6, 7], [(0, 7, 1), (1, 6, 1), (2, 5, 1)]),
        ([0, 1, 2, 3], [5, 6, 8, 9], [(0, 5, 2), (2, 8, 2)]),
        ([0, 2, 3], [4, 5, 6], [(0, 4, 1), (2, 5, 2)]),
    ],
)
def test_runs(from_pages, to_pages, runs):
    assert page_runs(from_pages, to_pages) == runs


def test_every_page_is_in_one_run():
    rng = np.random.default_rng(0)
    for _ in range(50):
        from_pages, to_pages = (rng.permutation(12)[:8].tolist() for _ in range(2))
        pairs = [(a + i, b + i) for a, b, num in page_runs(from_pages, to_pages) for i in range(num)]
        assert sorted(pairs) == sorted(zip(from_pages, to_pages))


def test_each_page_must_have_its_place():
    with pytest.raises(ValueError):
        page_runs([0, 1], [0])
