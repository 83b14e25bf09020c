"""copy_rows against indexing; a row that is not there stops all of them."""

import pytest
import torch

from eprt.ops import native
from eprt.ops.paged_rows import copy_rows

native.load()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_rows_go_where_they_are_sent(dtype):
    values = torch.arange(7 * 6).view(7, 6).to(dtype)
    memory = torch.zeros(5, 40, dtype=dtype)
    pages = memory[:, 4:28].unflatten(1, (4, 6))  # that lie apart
    to, source = torch.tensor([19, 0, 6, 3]), torch.tensor([6, 2, 2, 0])
    copy_rows(pages, to, values, source)
    want = torch.zeros(20, 6, dtype=dtype)
    want[to] = values[source]
    assert torch.equal(pages.flatten(0, 1), want)
    assert not memory[:, :4].any() and not memory[:, 28:].any()
    back = torch.zeros(4, 6, dtype=dtype)
    copy_rows(back, None, pages, to)
    assert torch.equal(back, values[source])
    copy_rows(back, to[:0], values, source[:0])


@pytest.mark.parametrize(("to", "source"), [([0, 20], [0, 1]), ([0, 1], [0, 7])])
def test_a_row_that_is_not_there_is_named_and_nothing_is_copied(to, source):
    values, pages = torch.ones(7, 6), torch.zeros(5, 4, 6)
    with pytest.raises(ValueError, match=f"row {source[1]} of 7 to row {to[1]} of 20"):
        copy_rows(pages, torch.tensor(to), values, torch.tensor(source))
    assert not pages.any()


def test_negative_rows_are_left_out():
    values, pages = torch.arange(1.0, 8).unsqueeze(1).repeat(1, 6), torch.zeros(5, 4, 6)
    copy_rows(pages, torch.tensor([3, -1, 9, -5]), values, torch.tensor([6, 0, -1, -1]))
    want = torch.zeros(5, 4, 6)
    want[0, 3] = 7
    assert torch.equal(pages, want)
    copy_rows(pages, torch.tensor([-1, 4]), values, None)
    want[1, 0] = 2
    assert torch.equal(pages, want)


def test_what_does_not_fit_is_refused():
    values, pages, rows = torch.ones(7, 6), torch.zeros(5, 4, 6), torch.arange(3)
    with pytest.raises(ValueError, match="do not become rows of 6 values"):
        copy_rows(pages.bfloat16(), rows, values, rows)
    with pytest.raises(ValueError, match="rows of 5 values"):
        copy_rows(pages, rows, values[:, :5], rows)
    with pytest.raises(ValueError, match=r"must be torch\.int64 \[Y\], alike"):
        copy_rows(pages, rows, values, rows[:2])
    with pytest.raises(ValueError, match="each row contiguous"):
        copy_rows(pages, rows, values.T, rows)
