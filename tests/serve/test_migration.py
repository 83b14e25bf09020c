"""What a running server says and does while experts move; this one also drafts, so its MTP layer's experts move too."""

import contextlib
import copy
import os
import signal
import threading

import httpx
import numpy as np
import pytest

from eprt.serve.running import RunningServer
from tests.serve.conftest import COUNTING, MODEL, token_ids
from tests.serve.processes import PATIENCE_S, PATIENT, held, num_sequences, ranks_of, wait_until

ROWS, SLOTS = 4, 36  # three MoE layers and the MTP layer's


@pytest.fixture(scope="module")
def server():
    options = ("--served-model-name", "demo", "--num-redundant-experts", "4", "--num-speculative-tokens", "2")
    with contextlib.ExitStack() as stack:
        running = RunningServer(MODEL, 4, *options, variables=PATIENT)
        stack.callback(running.kill)  # the last test leaves it lost
        yield running.wait_ready()


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


def state_of(http) -> dict:
    return http.get("/v1/eprt/rebalance").json()


def settle(http) -> dict:
    """The state once nothing is under way."""
    return wait_until(lambda: state if (state := state_of(http))["state"] == "idle" else None, "an end")


def shuffled(http, seed: int) -> dict:
    """The placement that serves, with all experts of all layers in other slots."""
    placement, rng = http.get("/v1/eprt/placement").json(), np.random.default_rng(seed)
    rows = [rng.permutation(row).tolist() for row in placement["physical_to_logical_map"]]
    return {"placement": {**placement, "physical_to_logical_map": rows, "slot_weight": None}}


def post(http, body: dict) -> httpx.Response:
    return http.post("/v1/eprt/rebalance", json=body)


def metrics(http, *names: str) -> list[list[float]]:
    """The values of all ranks, of every name at the same moment."""
    lines = http.get("/metrics").text.splitlines()
    return [
        [float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        for name in names
    ]


def test_without_requests_a_migration_proceeds_to_its_end_within_its_memory(http):
    wanted, before = shuffled(http, 0), state_of(http)["epoch"]
    (steps_before,) = metrics(http, "eprt_steps_total")
    assert post(http, wanted).status_code == 202
    state = settle(http)
    migration = state["migration"]
    assert migration["state"] == "done" and migration["rounds_done"] == migration["num_rounds"] > 10
    assert state["epoch"] == before + migration["num_rounds"]
    placement = http.get("/v1/eprt/placement").json()
    assert placement["physical_to_logical_map"] == wanted["placement"]["physical_to_logical_map"]
    assert np.shape(placement["physical_to_logical_map"]) == (ROWS, SLOTS) and placement["layers"] == [1, 2, 3, 4]
    expert_bytes = http.get("/v1/eprt/load").json()["expert_bytes"]
    assert 0 < state["used_bytes"] <= state["cap_bytes"] == 2 * expert_bytes < state["buffer_bytes"]
    cap, used, steps = metrics(http, "eprt_migration_cap_bytes", "eprt_migration_used_bytes", "eprt_steps_total")
    assert cap == [2 * expert_bytes] * 4 and max(used) == state["used_bytes"] and steps == steps_before


def test_a_second_one_is_refused_and_a_running_one_can_be_cancelled(http, server):
    """Whatever was reached by then serves on, and the tokens are those from before."""
    before, rows = token_ids(http), http.get("/v1/eprt/placement").json()["physical_to_logical_map"]
    first, second = shuffled(http, 1), shuffled(http, 2)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(token_ids(http))) for _ in range(3)]
    for thread in threads:
        thread.start()
    with held(ranks_of(server.url)[1]):  # the first goes on when the second has been answered
        assert post(http, first).status_code == 202
        busy = post(http, second)
    assert busy.status_code == 409 and busy.json()["error"]["code"] == "busy", busy.text
    assert "under way" in busy.json()["error"]["message"]
    assert post(http, {"cancel": True}).status_code in (202, 409)  # 409: it was done already
    state = settle(http)
    for thread in threads:
        thread.join()
    assert answers == [before] * 3
    migration, reached = state["migration"], http.get("/v1/eprt/placement").json()["physical_to_logical_map"]
    assert migration["state"] in ("rolled_back", "done"), state
    if migration["state"] == "rolled_back":
        assert "it was cancelled, says rank" in migration["reason"]
        assert reached != first["placement"]["physical_to_logical_map"]
        assert migration["rounds_done"] > 0 or reached == rows
    assert state["epoch"] == migration["from_epoch"] + migration["rounds_done"]
    assert token_ids(http) == before
    nothing = post(http, {"cancel": True})
    assert nothing.status_code == 409 and nothing.json()["error"]["code"] == "no_migration"


def test_a_placement_of_another_model_is_refused_by_field_layer_and_value(http):
    placement = http.get("/v1/eprt/placement").json()
    placement["slot_weight"] = None

    def edited(change) -> dict:
        wrong = copy.deepcopy(placement)
        change(wrong["physical_to_logical_map"])
        return {"placement": wrong}

    for body, words in (
        (edited(lambda rows: rows.append(rows[0])), ["5 MoE layers", "this server 4"]),
        (edited(lambda rows: rows[2].__setitem__(5, 32)), ["layer 2, slot 5", "32", "0..31"]),
        (edited(lambda rows: rows[1].__setitem__(slice(None), [0] * SLOTS)), ["layer 1", "expert 1"]),
        (edited(lambda rows: rows[3].__setitem__(0, -2)), ["layer 3, slot 0", "-2"]),
        (edited(lambda rows: rows[0].__setitem__(0, 1.5)), ["layer 0, slot 0", "1.5"]),
        (edited(lambda rows: rows[2].pop()), ["layer 2", "35 slots", "this server 36"]),
        (edited(lambda rows: [row.extend([0] * 4) for row in rows]), ["40 slots", "this server 36"]),
        ({"placement": {**placement, "num_gpus": 2}}, ["2 ranks", "this server 4"]),
        ({"placement": {**placement, "slot_weight": [[float(1)] * 3]}}, ["slot_weight"]),
        ({"placement": []}, ["placement must be an object, not []"]),
        ({"placement": {}}, ["physical_to_logical_map"]),
    ):
        answer = post(http, body)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and all(word in message for word in words), (message, words)
    assert http.get("/v1/eprt/placement").json()["epoch"] == placement["epoch"]
    assert state_of(http)["state"] == "idle"


def test_drafts_are_counted_and_the_mtp_layer_has_a_load(http):
    token_ids(http)
    names = "eprt_drafted_tokens_total", "eprt_accepted_tokens_total"
    drafted, accepted = wait_until(lambda: found if sum((found := metrics(http, *names))[0]) else None, "drafts")
    assert len(drafted) == len(accepted) == 4 and 0 < sum(accepted) <= sum(drafted)
    layers = {layer["layer"]: sum(layer["per_expert"]) for layer in http.get("/v1/eprt/load").json()["layers"]}
    assert list(layers) == [1, 2, 3, 4] and layers[1] == layers[2] == layers[3] > 0
    assert layers[4] > layers[3], "what is drafted, it sees besides"


def test_a_rank_dies_while_experts_move_and_the_old_placement_stands_to_the_end(http, server):
    """The last test of this server."""
    results = []

    def generate() -> None:
        results.append(http.post("/v1/completions", json={**COUNTING, "max_tokens": 1500, "n": 40}))

    request = threading.Thread(target=generate)
    request.start()
    wait_until(lambda: num_sequences(server.url), "the request")
    victim, epoch = ranks_of(server.url)[2], state_of(http)["epoch"]
    with held(victim):
        assert post(http, shuffled(http, 3)).status_code == 202
        os.kill(victim, signal.SIGKILL)
    # At once: the server is there for a few seconds more.
    migration = wait_until(
        lambda: one if (one := state_of(http)["migration"])["state"] != "running" else None, "a loss"
    )
    health = http.get("/health").json()
    request.join()
    assert results[0].status_code == 500 and results[0].json()["error"]["code"] == "rank_lost", results[0].text
    assert migration["state"] == "lost" and "rank 2" in migration["reason"], migration
    assert migration["epoch"] == epoch + migration["rounds_done"]
    assert health["status"] == "lost"
    assert server.wait_exit() != 0
