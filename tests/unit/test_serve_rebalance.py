"""The rebalancer's flags, and the body of POST /v1/eprt/rebalance."""

import json
from pathlib import Path

import numpy as np
import pytest
from eprt.balancer import Placement

from eprt.serve.errors import ApiError
from eprt.serve.options import OptionError, parse
from eprt.serve.rebalance_request import RebalanceRequest, parse_rebalance

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "checkpoint"
CURRENT = Placement(np.array([[0, 1, 2, 0]]), num_gpus=2)


def test_the_flags_say_what_they_are_for():
    options = parse(["--model", str(MODEL), "--rebalance", "auto", "--load-window", "2", "--rebalance-slow-ranks"])
    assert (options.rebalance, options.load_window_s, options.rebalance_slow_ranks) == ("auto", 2.0, True)
    assert parse(["--model", str(MODEL), "--replica-routing", "batch-lp"]).engine.replica_routing == "batch-lp"


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--rebalance", "on"], "--rebalance on: must be off, auto or dry-run"),
        (["--rebalance", "auto", "--spare-experts", "0"], "--rebalance auto needs --spare-experts of at least 1"),
        (["--replica-routing", "random"], "--replica-routing random: must be weights, local, batch or batch-lp"),
        (["--us-per-crossing", "-1"], "--us-per-crossing -1.0: must be finite and at least 0"),
        (["--load-window", "0"], "--load-window 0.0: must be above 0"),
        (["--migration-timeout", "-1"], "--migration-timeout -1.0: must be above 0"),
    ],
)
def test_a_flag_that_cannot_be_met_is_named(flags, words):
    with pytest.raises(OptionError) as caught:
        parse(["--model", str(MODEL), *flags])
    assert words in str(caught.value)


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
        ({"mode": "on"}, "mode='on': must be off, auto or dry-run"),
        ({"mode": ["auto"]}, "mode=['auto']: must be off, auto or dry-run"),
        ({"mode": "auto", "cancel": True}, "cancel stands alone"),
        ({"mode": "auto", "max_moves_per_layer": 2}, "mode stands alone"),
        ({"dry_run": 1}, "dry_run=1: must be true or false"),
        ({"max_moves_per_layer": True}, "max_moves_per_layer=True: must be an integer"),
        (
            {"placement": {"physical_to_logical_map": [[0, 1, 2, 3]]}},
            "slot 3] = 3: this model has experts 0..2",
        ),
        ({"placement": {"physical_to_logical_map": [[0, 1, 2, 0]], "epochs": 1}}, "unknown field 'epochs'"),
        ({"rank_speeds": [1, 0.5]}, "belongs to a placement"),
        ({"placement": {"physical_to_logical_map": [[1, 2, 0, 1]]}, "rank_speeds": [1]}, "a list of 2 numbers"),
        ({"placement": {"physical_to_logical_map": [[1, 2, 0, 1]]}, "rank_speeds": [1, 0]}, "rank_speeds[rank 1] = 0"),
        ([], "must be a JSON object, not list"),
    ],
)
def test_what_cannot_be_asked_is_named(body, words):
    with pytest.raises(ApiError) as caught:
        parse_rebalance(json.dumps(body).encode(), CURRENT)
    assert caught.value.status == 400 and words in caught.value.message
