"""PageRun: pages that lie side by side on both sides of a copy, so that one copy takes them all. Knows no memory."""

from collections.abc import Sequence
from typing import NamedTuple


class PageRun(NamedTuple):
    from_page: int  # the first
    to_page: int  # the first
    num_pages: int


def page_runs(from_pages: Sequence[int], to_pages: Sequence[int]) -> list[PageRun]:
    """The fewest: the order of copies does not matter."""
    runs: list[PageRun] = []
    for from_page, to_page in sorted(zip(from_pages, to_pages, strict=True)):
        if runs and (from_page, to_page) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = runs[-1]._replace(num_pages=runs[-1].num_pages + 1)
        else:
            runs.append(PageRun(from_page, to_page, 1))
    return runs
