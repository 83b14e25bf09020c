"""ChosenRows: which rows attend to all they see, and which to chosen tokens."""

import pytest
import torch

from eprt.layers.chosen_rows import ChosenRows
from tests.unit.layers.cases import batch_of

PAGE_SIZE = 16


def test_a_batch_is_cut_by_what_its_rows_see():
    """Decodes and prompts below, at and above top_k."""
    batch = batch_of([1, 1, 1, 5, 4], [2, 8, 7, 5, 0], 3)
    rows = ChosenRows.from_batch(batch, PAGE_SIZE, 8)
    assert rows.row_X is not None and rows.whole is not None and rows.whole_W is not None
    assert rows.row_X.tolist() == [1, 6, 7] and rows.length_X.tolist() == [9, 9, 10]
    assert rows.request_X.tolist() == [1, 3, 3] and rows.whole_W.tolist() == [0, 2, 3, 4, 5, 8, 9, 10, 11]
    whole = rows.whole
    assert whole.num_decode == 2 and whole.seq_len_B.tolist() == [3, 8, 8, 4]
    assert whole.query_start_B1.tolist() == [0, 1, 2, 5, 9]
    assert whole.page_table_BP.flatten().tolist() == [0, 2, 3, 4]
    assert whole.position_T.tolist() == [2, 7, 5, 6, 7, 0, 1, 2, 3]


@pytest.mark.parametrize("fields", [{"longest": 8}, {"page_size": 8}, {}])
def test_a_batch_of_short_contexts_is_left_alone(fields):
    batch = batch_of([1, 4], [7, 4], 1, longest=fields.get("longest"))
    rows = ChosenRows.from_batch(batch, fields.get("page_size", PAGE_SIZE), 8)
    assert rows.whole is batch and rows.num_rows == 0


def test_a_batch_of_long_contexts_has_no_other_rows():
    rows = ChosenRows.from_batch(batch_of([1, 2], [9, 10], 1, longest=12), PAGE_SIZE, 8)
    assert rows.whole is None and rows.position_X.tolist() == [9, 10, 11] and rows.request_X.tolist() == [0, 1, 1]


def test_an_empty_batch():
    batch = batch_of([], [], 0)
    assert ChosenRows.from_batch(batch, PAGE_SIZE, 8).num_rows == 0
    assert batch.position_T.dtype == torch.int64
