"""Experts move in a running server when asked to over HTTP, and nobody who generates notices."""

import copy
import time

import httpx
import pytest

from eprt.serve.running import RunningServer
from tests.serve.conftest import MODEL

BODY = {"model": "demo", "prompt": "Count from 3 to 60.", "max_tokens": 60, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True}  # fmt: skip


@pytest.fixture(scope="module")
def http():
    with (
        RunningServer(MODEL, 4, "--served-model-name", "demo", "--num-redundant-experts", "4") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def token_ids(http) -> list[int]:
    response = http.post("/v1/completions", json=BODY)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def settle(http) -> dict:
    """The rebalancer's state once nothing is under way."""
    deadline = time.monotonic() + 60
    while (state := http.get("/v1/eprt/rebalance").json())["migration"]["state"] in ("planning", "running"):
        assert time.monotonic() < deadline, state
        time.sleep(0.1)
    return state


def test_a_posted_placement_is_reached_and_changes_no_token(http):
    before = token_ids(http)
    placement = http.get("/v1/eprt/placement").json()
    rows = placement["physical_to_logical_map"]
    wanted = copy.deepcopy(placement)
    wanted["physical_to_logical_map"] = [row[9:] + row[:9] for row in rows]  # every expert to the rank before
    answer = http.post("/v1/eprt/rebalance", json={"placement": wanted})
    assert answer.status_code in (200, 202), answer.text
    during = token_ids(http)
    settle(http)
    reached = http.get("/v1/eprt/placement").json()
    assert reached["physical_to_logical_map"] == wanted["physical_to_logical_map"]
    assert reached["epoch"] > placement["epoch"]
    assert before == during == token_ids(http)


def test_a_placement_that_does_not_fit_is_named(http):
    placement = http.get("/v1/eprt/placement").json()
    for change, words in (
        (lambda rows: rows.pop(), "layers"),
        (lambda rows: rows[1].__setitem__(0, 99), "99"),
        (lambda rows: [row.pop() for row in rows], "slots"),
    ):
        wrong = {**copy.deepcopy(placement), "slot_weight": None}
        change(wrong["physical_to_logical_map"])
        answer = http.post("/v1/eprt/rebalance", json={"placement": wrong})
        error = answer.json()["error"]
        assert answer.status_code == 400 and words in error["message"], error
    assert http.get("/v1/eprt/placement").json() == placement
