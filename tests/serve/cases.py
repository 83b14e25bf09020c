"""Requests that many tests send, and the state in which a server has nothing to do."""

import json

from tests.serve.processes import wait_until

GREEDY = {"temperature": 0}
SUM = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], **GREEDY}
# Lets the demo model go on for as long as it is asked to.
ENDLESS = {"prompt": "Tell me", "ignore_eos": True, **GREEDY}


def complete(http, **fields) -> dict:
    response = http.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(http, path: str, body: dict) -> list[dict]:
    """The decoded events of a stream; asserts that it ends with [DONE]."""
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def is_idle(load: dict) -> bool:
    """Nothing runs, and the ranks, each of which tells its statistics by itself, have told of the same step: what was
    sent to experts has arrived there."""
    arrived = all(sum(layer["per_rank"]) == sum(layer["per_expert"]) for layer in load["layers"])
    return arrived and not any(r["num_running_now"] + r["num_waiting_now"] for r in load["ranks"])


def load_of(http) -> dict:
    return http.get("/v1/eprt/load").json()


def wait_idle(http) -> dict:
    """/v1/eprt/load once nothing runs; asserts that every KV page is free."""
    load = wait_until(lambda: load if is_idle(load := load_of(http)) else None, "idle ranks")
    assert [r["kv_pages_used_now"] for r in load["ranks"]] == [0] * len(load["ranks"])
    return load
