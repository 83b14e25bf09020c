"""A server that goes on when ranks are lost: streams, answers and states, with real processes and signals."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from eprt.serve.running import RunningServer
from tests.ranks.launch_wire import free_port
from tests.serve.cases import load_of
from tests.serve.conftest import MODEL
from tests.serve.processes import PATIENCE_S, PATIENT, assert_nothing_left, family, get, held, num_sequences, wait_until
from tests.serve.test_migration import post, shuffled

# Two ranks hold every expert twice; any two may go.
FLAGS = ("--max-lost-ranks", "2", "--num-redundant-experts", "32", "--max-num-seqs", "16")


class Burst:
    """Requests of several kinds at once; wait() returns everything that a fault must not change."""

    def __init__(self, url: str, num_tokens: int = 120):
        form = {"regex": "([a-z]{2,9} ){99}"}
        kinds = (
            {"temperature": 0},
            {"temperature": 0.9, "logprobs": 1},
            {"frequency_penalty": 0.5, "n": 2},
            {"temperature": 0.9, "structured_outputs": form},
        )
        common = {"max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True}
        self._bodies = [{"prompt": f"Count from {i} to 60.", "seed": i, **kinds[i % 4], **common} for i in range(9)]
        self._answers: dict[int, dict] = {}
        # One client for all: making nine takes a crowded machine longer than the server needs for the first answer.
        self._http = httpx.Client(base_url=url, timeout=PATIENCE_S)
        self._threads = [threading.Thread(target=self._ask, args=(i,), daemon=True) for i in range(9)]
        for thread in self._threads:
            thread.start()

    def _ask(self, i: int) -> None:
        self._answers[i] = self._http.post("/v1/completions", json=self._bodies[i]).json()

    def wait(self) -> list:
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._http.close()
        answers = [self._answers[i] for i in range(9)]
        assert not [answer for answer in answers if "error" in answer], answers
        return [
            [(c["token_ids"], c["text"], c["finish_reason"], c["logprobs"]) for c in answer["choices"]]
            + [(answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])]
            for answer in answers
        ]


def ranks_document(url: str) -> dict:
    return get(f"{url}/v1/eprt/ranks").json()


def states(url: str) -> list[str]:
    return [rank["state"] for rank in ranks_document(url)["ranks"]]


def pid_of(url: str, rank: int) -> int:
    return ranks_document(url)["ranks"][rank]["pid"]


def wait_lost(url: str, num_lost: int) -> dict:
    """The document once so many ranks were lost and the others have entered the view without them."""

    def settled() -> dict | None:
        document = ranks_document(url)
        return document if document["ranks_lost"] >= num_lost and not document["changing"] else None

    return wait_until(settled, f"{num_lost} losses")


def running(load: dict) -> int:
    return sum(rank["num_running_now"] + rank["num_waiting_now"] for rank in load["ranks"])


def metric(url: str, name: str) -> float:
    (line,) = [line for line in get(f"{url}/metrics").text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


@contextlib.contextmanager
def elastic_server(*flags: str, **variables: str) -> Iterator[RunningServer]:
    """Ends with nothing left, and status 0."""
    with RunningServer(MODEL, 4, *FLAGS, *flags, variables=PATIENT | variables) as server:
        processes = family(psutil.Process(server.process.pid))
        yield server
        assert server.stop() == 0, server.output()
        assert "Traceback" not in server.output(), server.output()
        assert_nothing_left(processes)


def test_two_lost_ranks_change_no_answer():
    """One in the midst of requests, then rank 0 amid a migration: nobody sees an error or another token."""
    with elastic_server() as server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        undisturbed = Burst(server.url).wait()
        burst = Burst(server.url)
        wait_until(lambda: num_sequences(server.url) >= 9, "requests")
        os.kill(pid_of(server.url, 2), signal.SIGKILL)
        assert burst.wait() == undisturbed
        document = wait_lost(server.url, 1)
        assert document["view"] == 1 and [r["state"] for r in document["ranks"]] == ["ready", "ready", "gone", "ready"]
        told = wait_until(lambda: get(f"{server.url}/v1/eprt/diagnose").json()["slots"], "the slots")
        assert told["view"] == 1 and told["ranks"] == document["ranks"]
        refused = post(http, shuffled(http, 0))
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "ranks_missing"
        burst = Burst(server.url)
        wait_until(lambda: num_sequences(server.url) >= 9, "requests")
        os.kill(pid_of(server.url, 0), signal.SIGKILL)
        assert burst.wait() == undisturbed
        wait_lost(server.url, 2)
        assert Burst(server.url).wait() == undisturbed
        assert metric(server.url, "eprt_ranks_lost_total") == 2 == metric(server.url, "eprt_view_change_seconds_count")
        assert metric(server.url, "eprt_requests_replayed_total") > 0 == metric(server.url, "eprt_faults_total")
        assert get(f"{server.url}/health").status_code == 200
        load = wait_until(lambda: load if not running(load := load_of(http)) else None, "idle ranks")
        assert [rank["kv_pages_used_now"] for rank in load["ranks"]] == [0] * 4


# Makes the main thread of a rank wait for ever for a lock.
HANG = """
import signal, threading
def hang(*_):
    lock = threading.Lock()
    lock.acquire(), lock.acquire()
signal.signal(signal.SIGUSR2, hang)
"""


def test_a_rank_that_is_stopped_or_hangs_is_killed_and_another_takes_its_slot(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HANG)
    with elastic_server("--restart-lost-ranks", PYTHONPATH=str(tmp_path)) as server:
        undisturbed = Burst(server.url).wait()
        burst = Burst(server.url, 120)
        pid = pid_of(server.url, 3)
        os.kill(pid, signal.SIGSTOP)
        wait_lost(server.url, 1)
        wait_until(lambda: not psutil.pid_exists(pid), "the end of the stopped process")
        assert burst.wait() == undisturbed
        wait_until(lambda: states(server.url) == ["ready"] * 4, "the return")
        assert pid_of(server.url, 3) != pid
        os.kill(pid_of(server.url, 3), signal.SIGUSR2)
        assert Burst(server.url).wait() == undisturbed  # long before the deadline of waits
        wait_lost(server.url, 2)
        assert "hangs, and is killed; " in server.output()
        wait_until(lambda: states(server.url) == ["ready"] * 4, "the return")
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
            assert post(http, shuffled(http, 1)).status_code == 202, "experts move again"
            os.kill(pid_of(server.url, 1), signal.SIGKILL)  # amid the migration
            wait_lost(server.url, 3)
            state = http.get("/v1/eprt/rebalance").json()
            assert state["state"] == "idle" and state["migration"]["state"] in ("rolled_back", "done")
            assert Burst(server.url).wait() == undisturbed


def test_a_rank_that_gets_stuck_while_it_loads_ends_the_start_and_is_named():
    port = free_port()
    server = RunningServer(MODEL, 2, *FLAGS[2:], "--max-lost-ranks", "1", "--load-timeout", "5", "--port", str(port))

    def loading() -> int | None:
        with contextlib.suppress(httpx.ConnectError):
            ranks = get(f"http://127.0.0.1:{port}/health").json()["ranks"]
            return next((r["pid"] for r in ranks if r["rank"] == 1 and not r["loaded"]), None)
        return None

    pid = wait_until(loading, "rank 1")
    with contextlib.suppress(ProcessLookupError), held(pid):
        assert server.wait_exit(PATIENCE_S) == 1
    output = server.output()
    assert f"eprt: rank 1 (pid {pid}, " in output and "no rank got any further for 5 s (--load-timeout)" in output
    assert "its process is stopped by a signal" in output and not psutil.pid_exists(pid)


def test_a_rank_retires_and_interrupts_nobody():
    with elastic_server("--drain-timeout", "0.2") as server:
        undisturbed = Burst(server.url).wait()
        burst = Burst(server.url)
        wait_until(lambda: num_sequences(server.url) >= 9, "requests")
        pid = pid_of(server.url, 1)
        answer = httpx.post(f"{server.url}/v1/eprt/ranks/1/retire", timeout=PATIENCE_S)
        assert answer.status_code == 202 and answer.json()["ranks"][1]["state"] == "retiring"
        assert burst.wait() == undisturbed
        wait_until(lambda: states(server.url) == ["ready", "gone", "ready", "ready"], "the retirement")
        wait_until(lambda: not psutil.pid_exists(pid), "the end of the process")
        assert ranks_document(server.url)["ranks_lost"] == 0
        for rank, code, status in ((1, "not_ready", 409), (9, "not_found", 404)):
            refused = httpx.post(f"{server.url}/v1/eprt/ranks/{rank}/retire", timeout=PATIENCE_S)
            assert refused.status_code == status and refused.json()["error"]["code"] == code
        assert httpx.post(f"{server.url}/v1/eprt/ranks/2/retire", timeout=PATIENCE_S).status_code == 202
        wait_until(lambda: states(server.url)[2] == "gone", "the second retirement")
        refused = httpx.post(f"{server.url}/v1/eprt/ranks/3/retire", timeout=PATIENCE_S)
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "capacity"
        assert Burst(server.url).wait() == undisturbed


def test_without_capacity_the_server_ends_and_says_why():
    server = RunningServer(MODEL, 4, "--max-lost-ranks", "1", "--num-redundant-experts", "12").wait_ready()
    processes = family(psutil.Process(server.process.pid))
    for rank, num_lost in ((1, 1), (2, 2)):
        os.kill(pid_of(server.url, rank), signal.SIGKILL)
        if num_lost == 1:
            wait_lost(server.url, num_lost)
    assert server.wait_exit() == 1
    assert "2 ranks of 11 slots per MoE layer hold 22 experts; the model has 32" in server.output()
    assert_nothing_left(processes)


def test_with_the_flag_nobody_waits_for_lost_experts_and_answers_say_so():
    """A rank takes experts with it that nobody else holds. Streams go on before they are read again."""
    flags = ("--max-lost-ranks", "1", "--num-redundant-experts", "12", "--serve-without-experts")
    common = {"max_tokens": 400, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    with RunningServer(MODEL, 4, *flags, variables=PATIENT) as server:
        bodies = [{"prompt": f"Count from {i} to 60.", **common} for i in range(6)]
        expected = ask_all(server.url, bodies)
        assert all("served_without_experts" not in answer for answer in expected)
        answers: list[dict] = []
        asking = threading.Thread(target=lambda: answers.extend(ask_all(server.url, bodies)), daemon=True)
        asking.start()
        wait_until(lambda: num_sequences(server.url) >= 6, "requests")
        os.kill(pid_of(server.url, 3), signal.SIGKILL)
        asking.join(PATIENCE_S)
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [400] * 6
        assert any(answer.get("served_without_experts") for answer in answers), server.output()
        wait_until(lambda: not ranks_document(server.url)["missing_experts"], "the experts")
        assert "experts of all layers are read meanwhile" in server.output()
        assert metric(server.url, "eprt_missing_experts") == 0
        assert metric(server.url, "eprt_view_change_seconds_count") == 2 and ranks_document(server.url)["view"] == 2
        again = ask_all(server.url, bodies)
        assert [told(answer) for answer in again] == [told(answer) for answer in expected]
        assert server.stop() == 0, server.output()
        assert "Traceback" not in server.output(), server.output()


def ask_all(url: str, bodies: list[dict]) -> list[dict]:
    """The answers to requests that are asked at once."""
    with ThreadPoolExecutor(len(bodies)) as pool, httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
        return list(pool.map(lambda body: http.post("/v1/completions", json=body).json(), bodies))


def told(answer: dict) -> tuple:
    return [choice["token_ids"] for choice in answer["choices"]], answer.get("served_without_experts")


def test_a_flag_that_cannot_be_kept_is_refused_with_the_arithmetic():
    with pytest.raises(
        RuntimeError, match=r"3 ranks of 8 slots .* hold 24 experts; .*--num-redundant-experts 12 would do"
    ):
        RunningServer(MODEL, 4, "--max-lost-ranks", "1").wait_ready()
