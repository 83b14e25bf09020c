"""DeepSeek V4 with prefill and decode apart: answers of one rank, whoever is lost meanwhile, and no page is left.

The cache is in fp8, the indexer's keys in fp4: so these are served, too.
"""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from eprt.serve.running import RunningServer
from tests.paths import DEMO_V4
from tests.serve.processes import PATIENCE_S, PATIENT, wait_until
from tests.serve.test_instances import document, leave_at_any_time, rank_load, wait_pulled, wait_quiet, wait_ready

FORMATS = ("--kv-cache-dtype", "fp8", "--index-cache-dtype", "fp4")
FLAGS = (
    *("--kv-cache-gb", "0.1", "--max-num-seqs", "16", "--chunk-size", "200", "--num-speculative-tokens", "1"),
    *FORMATS,
)
APART = (
    *("--prefill", "1", "--prefill-ranks", "2", "--decode", "2"),
    *("--local-prefill-tokens", "0", "--restart-lost-ranks"),
)
LENGTHS = (127, 128, 129, 255, 256, 257, 511, 512, 513)


def ask(server: RunningServer, length: int, seed: int = 0) -> tuple[Any, ...]:
    """Tokens and log-probabilities."""
    prompt = [3 + (7 * seed + 31 * t + length) % 600 for t in range(length)]
    body = {"prompt": prompt, "temperature": 0.8 * (length % 2), "seed": length, "max_tokens": 12, "ignore_eos": True}
    body |= {"model": server.model, "return_token_ids": True, "logprobs": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).json()
    (choice,) = answer["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def ask_all(server: RunningServer, seed: int = 0) -> list[tuple[Any, ...]]:
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        return list(pool.map(lambda length: ask(server, length, seed), LENGTHS))


@pytest.fixture(scope="module")
def instances() -> Iterator[RunningServer]:
    with RunningServer(DEMO_V4, 0, *FLAGS, *APART, variables=PATIENT, timeout_s=2 * PATIENCE_S) as server:
        yield server


@pytest.fixture(scope="module")
def alone(instances) -> list[list[tuple[Any, ...]]]:
    """What one rank answers, by seed."""
    with RunningServer(DEMO_V4, 1, *FLAGS, variables=PATIENT) as server:
        return [ask_all(server, seed) for seed in range(3)]


def test_answers_are_those_of_one_rank_and_no_prompt_is_computed_twice(instances, alone):
    assert ask_all(instances) == alone[0]
    now = wait_quiet(instances)
    handoffs = now["handoffs"]
    assert (handoffs["num_done"], handoffs["num_failed"], handoffs["num_late"]) == (len(LENGTHS), 0, 0)
    wait_pulled(instances, "decode-0", "decode-1")
    ranks = [rank_load(instances, f"decode-{i}") for i in range(2)]
    assert not any(rank["num_prompt_tokens"] for rank in ranks)
    again = ask(instances, 513)
    assert again == alone[0][-1]
    after = wait_quiet(instances)["handoffs"]
    moved, shared = (after[name] - handoffs[name] for name in ("num_pulled", "num_shared"))
    assert moved and (shared == 0 or shared > 2), "two full pages and a bookmark, where the same rank has it again"


def test_clients_that_leave_at_any_time_leave_nothing(instances):
    prompts = [[3 + (number + 5 * t) % 600 for t in range(100 + 37 * number)] for number in range(12)]
    leave_at_any_time(instances, prompts)


@pytest.mark.parametrize(("seed", "name"), [(1, "decode-1"), (2, "prefill-0")])
def test_an_instance_that_is_killed_costs_no_request_and_no_token(instances, alone, seed, name):
    before = wait_ready(instances, "prefill-0", "decode-0", "decode-1")
    answers: list[list[tuple[Any, ...]]] = []
    asking = threading.Thread(target=lambda: answers.append(ask_all(instances, seed)))
    asking.start()
    wait_until(lambda: document(instances)["handoffs"]["num_done"] > before["handoffs"]["num_done"], "a handoff")
    (victim,) = [one for one in before["instances"] if one["name"] == name]
    os.kill(victim["ranks"][0]["pid"], signal.SIGKILL)
    asking.join()
    assert answers == [alone[seed]]
    wait_until(lambda: document(instances)["instances_lost"] > before["instances_lost"], "its loss")
    wait_quiet(instances)
