"""The body of POST /v1/eprt/rebalance: what can be asked, and mistakes that are named."""

import json

import pytest

from eprt.serve.errors import ApiError
from eprt.serve.rebalance.request import RebalanceRequest, parse_rebalance
from tests.unit.serve.rebalance.cases import CURRENT

ROW = {"physical_to_logical_map": [[1, 2, 0, 2]]}


@pytest.mark.parametrize(
    "body, want",
    [
        (b"", RebalanceRequest()),
        (b"{}", RebalanceRequest()),
        (b'{"dry_run": true, "max_moves_per_layer": 3}', RebalanceRequest(dry_run=True, max_moves_per_layer=3)),
        (b'{"cancel": true}', RebalanceRequest(cancel=True)),
        (b'{"mode": "dry-run"}', RebalanceRequest(mode="dry-run")),
    ],
)
def test_what_can_be_asked(body, want):
    assert parse_rebalance(body, CURRENT) == want


def test_a_placement_file_is_a_body_with_or_without_its_options():
    rows = [[1, 2, 0, 1]]
    for body in ({"placement": {"physical_to_logical_map": rows}}, {"physical_to_logical_map": rows, "dry_run": True}):
        request = parse_rebalance(json.dumps(body).encode(), CURRENT)
        assert request.target is not None and request.target.physical_to_logical_map.tolist() == rows
        assert request.dry_run == ("dry_run" in body)


@pytest.mark.parametrize(
    "body, words",
    [
        ({"mode": "on"}, 'mode="on": must be off, auto or dry-run'),
        ({"mode": ["auto"]}, 'mode=["auto"]: must be off, auto or dry-run'),
        ({"mode": "auto", "cancel": True}, "cancel stands alone"),
        ({"mode": "auto", "max_moves_per_layer": 2}, "mode stands alone"),
        ({"dry_run": 1}, "dry_run=1: must be true or false"),
        ({"cancel": ["x" * 5000]}, f'cancel=["{"x" * 59}...: must be true or false'),
        (b"null", "must be a JSON object, not null"),
        ({"max_moves_per_layer": True}, "max_moves_per_layer=True: must be an integer"),
        (
            {"placement": {"physical_to_logical_map": [[0, 1, 2, 3]]}},
            "slot 3] = 3: this model has experts 0..2",
        ),
        ({"placement": {"physical_to_logical_map": [[0, 1, 2, 0]], "epochs": 1}}, 'unknown field "epochs"'),
        ({"rank_speeds": [1, 0.5]}, "belongs to a placement"),
        ({"placement": {"physical_to_logical_map": [[1, 2, 0, 1]]}, "rank_speeds": [1]}, "a list of 2 numbers"),
        ({"placement": {"physical_to_logical_map": [[1, 2, 0, 1]]}, "rank_speeds": [1, 0]}, "rank_speeds[rank 1] = 0"),
        ({**ROW, "rank_speeds": [1, 10**400]}, "rank_speeds[rank 1] = 1000"),
        ({"max_moves_per_layer": 10**4000}, "max_moves_per_layer=1000"),
        ({**ROW, "slot_weight": [[1, 1, 1, 10**400]]}, "slot_weight must be equally long lists of numbers"),
        ({**ROW, "slot_weight": [["1", "0.5", "1", "0.5"]]}, "slot_weight must be equally long lists of numbers"),
        ({**ROW, "slot_weight": [[True, True, True, False]]}, "slot_weight must be equally long lists of numbers"),
        ({**ROW, "epoch": True}, "epoch=True: must be an integer"),
        ({**ROW, "max_moves_per_layer": 1}, "a posted placement is reached in full"),
        ({**ROW, "placement": ROW}, "placement and physical_to_logical_map"),
        ([], "must be a JSON object, not []"),
        (b'{"dry_run": true, "dry_run": false}', "twice in one object"),
        (b'{"mode": "\xff"}', "the body is not JSON"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_what_cannot_be_asked_is_named(body, words):
    with pytest.raises(ApiError) as caught:
        parse_rebalance(body if isinstance(body, bytes) else json.dumps(body).encode(), CURRENT)
    assert caught.value.status == 400 and words in caught.value.message
