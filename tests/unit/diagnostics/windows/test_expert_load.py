"""The expert load of a window: slots of all ranks side by side, tokens added up by expert."""

import json

import pytest
from eprt.diagnostics import ExpertRows
from eprt.diagnostics.windows.expert_load import ExpertLoad

ROWS = [ExpertRows(2, (1, 3), ((0, rank), (-1, rank)), ((5, rank), (0, 7))) for rank in range(2)]


def test_tokens_are_added_up_by_expert():
    load = ExpertLoad.from_rows(ROWS)
    assert load is not None and load.epoch == 2 and load.layers_L.tolist() == [1, 3]
    assert load.load_LE.tolist() == [[10, 1], [7, 7]] and load.rank_of_slot_P.tolist() == [0, 0, 1, 1]
    assert load.physical_to_logical_LP.tolist() == [[0, 0, 0, 1], [-1, 0, -1, 1]]
    assert load.slot_rows_LP.tolist() == [[5, 0, 5, 1], [0, 7, 0, 7]]
    document = load.to_json()
    assert json.loads(json.dumps(document)) == document
    assert document["rank_of_slot"] == [0, 0, 1, 1] and document["load"] == [[10, 1], [7, 7]]


def test_ranks_may_have_different_numbers_of_slots_and_none_at_all():
    load = ExpertLoad.from_rows([ExpertRows(0, (1,), ((),), ((),)), ExpertRows(1, (1,), ((4, 0, -1),), ((1, 2, 0),))])
    assert load is not None and load.rank_of_slot_P.tolist() == [1, 1, 1] and load.load_LE.tolist() == [[2, 0, 0, 0, 1]]
    assert load.epoch == 1, "the newest of them"


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [None, None],
        [ROWS[0], None],
        [ROWS[0], ExpertRows(2, (1, 4), ((0, 1), (0, 1)), ((1, 1), (1, 1)))],
        [ROWS[0], ExpertRows(2, (1, 3), ((0, 1), (0,)), ((1, 1), (1,)))],
        [ExpertRows(0, (), (), ())],
    ],
    ids=["no rank", "none tells", "one does not tell", "other layers", "ragged", "no layer"],
)
def test_what_does_not_fit_together_is_no_load(rows):
    assert ExpertLoad.from_rows(rows) is None
