"""Prefill and decode apart on GPUs: pages are pulled from GPU to GPU, tokens stay those of one group."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gpu.gpus import MOST_RANKS, run_case

pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 2, reason="needs two NVIDIA GPUs")]
FLAGS = ("--device", "cuda", "--dtype", "float32", "--kv-cache-gb", "0.1", "--max-num-seqs", "16", "--page-size", "16")
FLAGS += ("--graph-sizes", "1", "16")
APART = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0", "--restart-lost-ranks")


@pytest.mark.parametrize(
    "dtype, drafts, cache",
    [
        ("float32", 1, "auto"),
        ("bfloat16", 0, "fp8"),
        pytest.param("float32", 0, "auto", marks=pytest.mark.long),
        pytest.param("bfloat16", 1, "auto", marks=pytest.mark.long),
    ],
)
def test_requests_go_on_in_an_engine_that_pulls_their_pages(dtype, drafts, cache):
    print(run_case(2, "cases_instances:requests_go_on", dtype=dtype, drafts=drafts, cache=cache))


@pytest.mark.long
def test_pages_come_while_all_sms_compute():
    print(run_case(2, "cases_instances:copies_need_no_sm"))


def tokens_of(answers: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """All but the log-probabilities."""
    return [(tokens, *rest) for tokens, _, *rest in answers]


def near(got: list[tuple[Any, ...]], want: list[tuple[Any, ...]]) -> bool:
    pairs = [pair for one, other in zip(got, want, strict=True) for pair in zip(one[1], other[1], strict=True)]
    return all(abs(a - b) < 1e-3 for a, b in pairs)


@pytest.fixture(scope="module")
def apart() -> Iterator[Any]:
    """A server of two instances with a GPU each."""
    from eprt.serve.running import RunningServer
    from tests.gpu.cases_model import DEMO

    with RunningServer(DEMO, 0, *FLAGS, *APART, timeout_s=150) as server:
        yield server


def test_a_server_of_instances_answers_as_one_group(apart):
    from eprt.serve.running import RunningServer
    from tests.gpu.cases_model import DEMO
    from tests.serve.test_instances import ask_all, wait_quiet

    with RunningServer(DEMO, 1, *FLAGS, timeout_s=150) as server:
        want = ask_all(server, range(16))
    before = wait_quiet(apart)["handoffs"]
    got = ask_all(apart, range(16))
    assert tokens_of(got) == tokens_of(want) and near(got, want)
    after = wait_quiet(apart)["handoffs"]
    done = {key: after[key] - before[key] for key in ("num_done", "num_failed", "num_late", "num_pulled")}
    assert done["num_done"] == 16 - sum(len(tokens) == 1 for tokens, *_ in want), done
    assert done["num_failed"] == done["num_late"] == 0 and done["num_pulled"] > 16, done


@pytest.mark.long
@pytest.mark.skipif(MOST_RANKS > 2, reason="a third instance has a GPU of its own")
def test_an_instance_without_a_gpu_is_not_started(apart):
    from tests.serve.processes import PATIENCE_S

    refused = httpx.post(f"{apart.url}/v1/eprt/instances", json={"role": "prefill"}, timeout=PATIENCE_S)
    assert refused.status_code == 500 and "which leaves 0; retire one first" in refused.text


@pytest.mark.parametrize("name", ["prefill-0", pytest.param("decode-0", marks=pytest.mark.long)])
def test_an_instance_that_is_killed_costs_no_request_and_comes_back(apart, name):
    """A token may become another one where its request begins again in another batch; none is lost."""
    from tests.serve.processes import PATIENCE_S, wait_until
    from tests.serve.test_instances import ask_all, document, wait_quiet, wait_ready

    wait_ready(apart, "prefill-0", "decode-0")
    want = ask_all(apart, range(32), max_tokens=48)
    before = wait_quiet(apart)
    answers: list[list[tuple[Any, ...]]] = []
    asking = threading.Thread(target=lambda: answers.append(ask_all(apart, range(32), max_tokens=48)))
    asking.start()
    num_done = before["handoffs"]["num_done"]
    wait_until(lambda: document(apart)["handoffs"]["num_done"] > num_done, "a handoff")
    (victim,) = [one for one in before["instances"] if one["name"] == name]
    os.kill(victim["ranks"][0]["pid"], signal.SIGKILL)
    asking.join()
    wait_until(lambda: document(apart)["instances_lost"] > before["instances_lost"], f"{name} is lost")
    (got,) = answers
    num_same = sum(one == other for one, other in zip(tokens_of(got), tokens_of(want), strict=True))
    print(f"{name} was killed: {num_same} of 32 answers are the same", flush=True)
    assert num_same >= 30, json.dumps([tokens_of(got), tokens_of(want)])
    assert all(len(tokens) == usage[1] and reason in ("stop", "length") for tokens, _, reason, usage in got)
    wait_quiet(apart)
    wait_ready(apart, "prefill-0", "decode-0")
    num_done = document(apart)["handoffs"]["num_done"]
    assert tokens_of(ask_all(apart, range(8), max_tokens=48)) == tokens_of(want)[:8]
    wait_until(lambda: document(apart)["handoffs"]["num_done"] > num_done, "a handoff to or from the new one")
    wait_quiet(apart)
    assert "eprt_faults_total 0.0" in httpx.get(f"{apart.url}/metrics", timeout=PATIENCE_S).text
    assert "Traceback" not in apart.output(), apart.output()
