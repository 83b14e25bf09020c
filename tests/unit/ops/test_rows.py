"""Where rows go: grouped by slot, stable, masked entries last."""

import torch

from eprt.ops.rows import place_rows


def test_rows_are_grouped_by_slot_in_the_order_of_entries():
    slot_TK = torch.tensor([[2, 0], [-1, 2], [0, -1]])
    row_TK, token_R, count_E = place_rows(slot_TK, 4)
    assert row_TK.tolist() == [[2, 0], [-1, 3], [1, -1]]
    assert token_R.tolist() == [0, 2, 0, 1, 1, 2]  # the last two are those of masked entries
    assert count_E.tolist() == [2, 0, 2, 0] and count_E.dtype == torch.int32


def test_no_tokens():
    row_TK, token_R, count_E = place_rows(torch.zeros(0, 3, dtype=torch.int32), 2)
    assert row_TK.shape == (0, 3) and token_R.shape == (0,) and count_E.tolist() == [0, 0]
