"""Prefill and decode apart on GPUs: pages are pulled from GPU to GPU, tokens stay those of one group, nobody faults."""

import os
import signal
import threading
from typing import Any

import pytest

from tests.gpu.gpus import MOST_RANKS, run_case

pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 2, reason="needs two NVIDIA GPUs")]
FLAGS = ("--device", "cuda", "--dtype", "float32", "--kv-cache-gb", "0.1", "--max-num-seqs", "16", "--page-size", "16")
APART = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0", "--restart-lost-ranks")


@pytest.mark.parametrize(
    "dtype, drafts, cache",
    [("float32", 0, "auto"), ("float32", 1, "auto"), ("bfloat16", 1, "auto"), ("bfloat16", 0, "fp8")],
)
def test_requests_go_on_in_an_engine_that_pulls_their_pages(dtype, drafts, cache):
    print(run_case(2, "cases_instances:requests_go_on", dtype=dtype, drafts=drafts, cache=cache))


def test_pages_come_while_all_sms_compute():
    print(run_case(2, "cases_instances:copies_need_no_sm"))


def without_logprobs(answers: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(tokens, *rest) for tokens, _, *rest in answers]


def near(got: list[tuple[Any, ...]], want: list[tuple[Any, ...]]) -> bool:
    pairs = [pair for one, other in zip(got, want, strict=True) for pair in zip(one[1], other[1], strict=True)]
    return all(abs(a - b) < 1e-3 for a, b in pairs)


def test_a_server_of_instances_answers_as_one_group_and_outlives_each():
    """Answers of one group; then the prefill instance is killed under load, and the decode instance once it is back."""
    import httpx

    from eprt.serve.running import RunningServer
    from tests.serve.conftest import MODEL
    from tests.serve.processes import PATIENCE_S, wait_until
    from tests.serve.test_instances import ask_all, document, wait_quiet, wait_ready

    with RunningServer(MODEL, 1, *FLAGS, timeout_s=240) as server:
        want = ask_all(server, range(16))
    with RunningServer(MODEL, 0, *FLAGS, *APART, timeout_s=240) as server:
        got = ask_all(server, range(16))
        assert without_logprobs(got) == without_logprobs(want) and near(got, want)
        done = wait_quiet(server)["handoffs"]
        assert done["num_done"] == 16 - sum(len(tokens) == 1 for tokens, *_ in want), done
        assert done["num_failed"] == done["num_late"] == 0 and done["num_pulled"] > 16, done
        refused = httpx.post(f"{server.url}/v1/eprt/instances", json={"role": "prefill"}, timeout=PATIENCE_S)
        print(refused.status_code, refused.text, flush=True)
        if MOST_RANKS == 2:
            assert refused.status_code == 500 and "which leaves 0; retire one first" in refused.text
        for name in ("prefill-0", "decode-0"):
            before = wait_ready(server, "prefill-0", "decode-0")
            answers: list[list[tuple[Any, ...]]] = []
            asking = threading.Thread(
                target=lambda kept=answers: kept.append(ask_all(server, range(32), max_tokens=48))
            )
            asking.start()
            num_done = before["handoffs"]["num_done"]
            wait_until(lambda num=num_done: document(server)["handoffs"]["num_done"] > num, "a handoff")
            (victim,) = [one for one in before["instances"] if one["name"] == name]
            os.kill(victim["ranks"][0]["pid"], signal.SIGKILL)
            asking.join()
            lengths = [(len(tokens), reason) for tokens, _, reason, _ in answers[0]]
            assert len(lengths) == 32 and all(reason in ("stop", "length") for _, reason in lengths), lengths
            num_lost = before["instances_lost"]
            wait_until(lambda num=num_lost: document(server)["instances_lost"] > num, f"{name} is lost")
            wait_quiet(server)
        again = ask_all(server, range(16))
        assert without_logprobs(again) == without_logprobs(want)
        assert "eprt_faults_total 0.0" in httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
        assert "Traceback" not in server.output(), server.output()
