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
    begin, shift, end = -1, 0, -1  # of the run that the next page may lengthen; -1: there is none
    for from_page, to_page in sorted(zip(from_pages, to_pages, strict=True)):
        if from_page != end or to_page - from_page != shift:
            if begin >= 0:
                runs.append(PageRun(begin, begin + shift, end - begin))
            begin, shift = from_page, to_page - from_page
        end = from_page + 1
    if begin >= 0:
        runs.append(PageRun(begin, begin + shift, end - begin))
    return runs
