"""Prefill and decode apart: the answers of one group of ranks, whoever is lost meanwhile, and no page that is left."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from eprt import env
from eprt.serve.running import RunningServer
from tests.serve.processes import PATIENCE_S, wait_until
from tests.unit.cases import MODEL

FLAGS = ("--prefill", "1", "--decode", "2", "--local-prefill-tokens", "0", "--page-size", "8", "--restart-lost-ranks")
ALL = ("prefill-0", "decode-0", "decode-1")
TIERS = ("--tier", "max=500,100", "--tier", "base=600,200")


@pytest.fixture(scope="module")
def instances() -> Iterator[RunningServer]:
    with RunningServer(MODEL, 0, *FLAGS, *TIERS, "--num-speculative-tokens", "1", timeout_s=2 * PATIENCE_S) as server:
        yield server


def document(server: RunningServer) -> dict[str, Any]:
    return httpx.get(f"{server.url}/v1/eprt/instances", timeout=PATIENCE_S).json()


def wait_ready(server: RunningServer, *names: str) -> dict[str, Any]:
    """The document once these instances are all there, and ready: one that was killed comes back by and by."""

    def are_ready() -> dict[str, Any] | None:
        now = document(server)
        ready = {one["name"] for one in now["instances"] if one["state"] == "ready"}
        return now if ready == set(names) == {one["name"] for one in now["instances"]} else None

    return wait_until(are_ready, f"{', '.join(names)} ready")


def wait_pulled(server: RunningServer, *names: str) -> None:
    """Until the statistics of these instances, which ranks tell by themselves, have all the pages of the handoffs."""

    def have_told() -> bool:
        told = sum(rank["num_pulled_pages"] for name in names for rank in load_of(server, name)["ranks"])
        return told == document(server)["handoffs"]["num_pulled"]

    wait_until(have_told, "statistics of pulled pages")


def load_of(server: RunningServer, name: str) -> dict[str, Any]:
    return httpx.get(f"{server.url}/v1/eprt/load?instance={name}", timeout=PATIENCE_S).json()


def rank_load(server: RunningServer, name: str) -> dict[str, Any]:
    """The statistics of an instance's only rank."""
    (rank,) = load_of(server, name)["ranks"]
    return rank


def ask(server: RunningServer, number: int, **fields) -> tuple[Any, ...]:
    """Tokens, log-probabilities, finish reason and usage."""
    prompt = f"What is {number} + {7 * number}? " * (1 + number % 5)
    body = {"prompt": prompt, "temperature": 0.7 * (number % 3), "seed": number, "max_tokens": 12, "logprobs": 1}
    form = {"structured_outputs": {"regex": "[a-f0-9]{4,40}"}} if number % 4 == 3 else {}
    body |= {"return_token_ids": True, "model": server.model, **form, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).json()
    (choice,) = answer["choices"]
    usage = answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"], usage


def ask_all(server: RunningServer, numbers: range, **fields) -> list[tuple[Any, ...]]:
    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(lambda number: ask(server, number, **fields), numbers))


def wait_quiet(server: RunningServer) -> dict[str, Any]:
    """The document once nothing runs and no page has an owner."""

    def quiet() -> dict[str, Any] | None:
        now = document(server)
        used = [one["kv_pages_used"] + one["held"] + one["arriving"] for one in now["instances"]]
        return now if not any(used) and not now["handoffs"]["under_way"] else None

    return wait_until(quiet, "free pages")


@pytest.fixture(scope="module")
def alone(instances) -> list[tuple[Any, ...]]:
    """What one rank answers."""
    with RunningServer(MODEL, 1, "--page-size", "8", "--num-speculative-tokens", "1") as server:
        return ask_all(server, range(16))


def test_answers_are_those_of_one_group_of_ranks(instances, alone):
    assert ask_all(instances, range(16)) == alone
    now = wait_quiet(instances)
    assert now["handoffs"]["num_done"] == 16 - sum(len(tokens) == 1 for tokens, *_ in alone)
    assert now["handoffs"]["num_failed"] == now["handoffs"]["num_late"] == 0
    wait_pulled(instances, *ALL[1:])
    ranks = [rank_load(instances, name) for name in ALL[1:]]
    assert not any(one["num_prompt_tokens"] for one in ranks), "decode instances compute no prompt"
    num_prompt = sum(usage[0] for *_, usage in alone)
    wait_until(lambda: rank_load(instances, "prefill-0")["num_prompt_tokens"] == num_prompt, "its statistics")


def test_the_second_turn_moves_only_new_pages(instances):
    tokens, *_ = ask(instances, 1, prompt=[65] * 64, max_tokens=9, ignore_eos=True)
    before = wait_quiet(instances)["handoffs"]
    ask(instances, 2, prompt=[65] * 64 + tokens + [66] * 8)
    after = wait_quiet(instances)["handoffs"]
    # Of 81 tokens' 11 pages one decode instance has 9. The router need not choose that one.
    assert after["num_pulled"] - before["num_pulled"] in (2, 11)
    assert after["num_pulled"] + after["num_shared"] - before["num_pulled"] - before["num_shared"] == 11


def leave_at_any_time(server: RunningServer, prompts: Sequence[str | list[int]]) -> None:
    """Streams whose clients go before the first piece, or behind one, two or three."""

    def leave(number: int) -> None:
        body = {"prompt": prompts[number], "max_tokens": 200, "ignore_eos": True, "stream": True, "model": server.model}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as stream:
            for i, _ in enumerate(stream.iter_lines()):
                if i >= number % 4:
                    break

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(len(prompts))))
    wait_quiet(server)
    assert "eprt_faults_total 0.0" in httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text


def test_clients_that_leave_at_any_time_leave_nothing(instances):
    leave_at_any_time(instances, [f"Tell me {number} " * 8 for number in range(24)])


@pytest.mark.parametrize("name", ["decode-1", "prefill-0"])
def test_an_instance_that_is_killed_costs_no_request_and_no_token(instances, alone, name):
    before = wait_ready(instances, *ALL)
    answers: list[list[tuple[Any, ...]]] = []
    asking = threading.Thread(target=lambda: answers.append(ask_all(instances, range(16))))
    asking.start()
    wait_until(lambda: document(instances)["handoffs"]["num_done"] > before["handoffs"]["num_done"], "a handoff")
    (victim,) = [one for one in before["instances"] if one["name"] == name]
    os.kill(victim["ranks"][0]["pid"], signal.SIGKILL)
    asking.join()
    assert answers == [alone]
    after = wait_until(lambda: (now := document(instances))["instances_lost"] > before["instances_lost"] and now, "it")
    assert after["instances_lost"] == before["instances_lost"] + 1
    wait_quiet(instances)


def test_what_is_of_one_instance_asks_for_its_name(instances):
    wait_ready(instances, *ALL)
    refused = httpx.get(f"{instances.url}/v1/eprt/load", timeout=PATIENCE_S)
    assert refused.status_code == 400 and "one of decode-0, decode-1, prefill-0" in refused.text
    for path in ("placement", "diagnose", "ranks", "rebalance"):
        found = httpx.get(f"{instances.url}/v1/eprt/{path}?instance=decode-0", timeout=PATIENCE_S)
        assert found.status_code == 200, found.text
    page = f"{instances.url}/v1/eprt/instances/prefill-0/diagnose/page/"
    assert httpx.get(page, timeout=PATIENCE_S).status_code == 200
    health = httpx.get(f"{instances.url}/health", timeout=PATIENCE_S).json()
    assert [rank["rank"] for rank in health["ranks"]] == [0, 1, 2]


def test_an_instance_joins_from_another_shell_and_retires(instances):
    command = [sys.executable, "-m", "eprt.serve.join", instances.url, "--role", "prefill", "-n", "1"]
    with subprocess.Popen(command, env=env.without_mpi(), stdout=subprocess.DEVNULL) as joiner:
        try:
            wait_ready(instances, *ALL, "prefill-1")
            assert len(httpx.get(f"{instances.url}/health", timeout=PATIENCE_S).json()["ranks"]) == 4
            joiner.send_signal(signal.SIGINT)
            assert joiner.wait(PATIENCE_S) == 0
        finally:
            joiner.kill()
    wait_until(lambda: state_of(instances, "prefill-1") is None, "its end")
    ask(instances, 5)
    refused = subprocess.run([*command[:-1], "0"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert refused.returncode == 2 and "-n 0: must be at least 1" in refused.stderr
    refused = subprocess.run(command[:4], capture_output=True, text=True, timeout=PATIENCE_S)
    assert refused.returncode == 2 and "give --role prefill or --role decode" in refused.stderr


def test_tiers_are_answered_and_counted(instances):
    body = {"prompt": "Tell me", "max_tokens": 3, "ignore_eos": True, "model": instances.model}
    url = f"{instances.url}/v1/completions"

    def given(**fields) -> httpx.Response:
        return httpx.post(url, json=body | fields, timeout=PATIENCE_S)

    assert [given(service_tier=name).json()["service_tier"] for name in ("priority", "auto", "max")] == [
        "max",
        "base",
        "max",
    ]
    assert '"service_tier":"base"' in given(stream=True).text
    refused = given(service_tier="gold")
    assert refused.status_code == 400 and "must be one of auto, default, priority, flex, max, base" in refused.text
    metrics = httpx.get(f"{instances.url}/metrics", timeout=PATIENCE_S).text
    assert 'eprt_tier_requests_total{outcome="met",tier="max"} 2.0' in metrics


def test_an_instance_is_started_by_a_request_and_retired(instances):
    url = f"{instances.url}/v1/eprt/instances"
    refused = httpx.post(url, json={"role": "chief"}, timeout=PATIENCE_S)
    assert refused.status_code == 400 and "must be prefill or decode" in refused.text
    started = httpx.post(url, json={"role": "prefill"}, timeout=PATIENCE_S)
    assert started.status_code == 202, started.text
    wait_until(lambda: state_of(instances, "prefill-1") == "ready", "the fourth instance")
    assert document(instances)["starting"] == []
    assert httpx.delete(f"{url}/prefill-1", timeout=PATIENCE_S).status_code == 202
    wait_until(lambda: state_of(instances, "prefill-1") is None, "its end")
    again = httpx.delete(f"{url}/prefill-1", timeout=PATIENCE_S)
    assert again.status_code == 404 and "there are prefill-0, decode-0, decode-1" in again.text


def state_of(server: RunningServer, name: str) -> str | None:
    return {one["name"]: one["state"] for one in document(server)["instances"]}.get(name)
