"""DeepSeek V4 on ranks that are lost and come back, while experts move, with drafts: nobody gets another token."""

import os
import signal
import threading

import httpx

from eprt.serve.running import RunningServer
from tests.paths import DEMO_V4
from tests.serve.processes import PATIENCE_S, PATIENT, num_sequences, wait_until
from tests.serve.test_elastic import pid_of, states, wait_lost
from tests.serve.test_migration import post, settle, shuffled

FLAGS = (
    *("--max-lost-ranks", "1", "--num-redundant-experts", "32", "--restart-lost-ranks"),
    *("--num-speculative-tokens", "1", "--kv-cache-gb", "0.1", "--max-num-seqs", "16", "--chunk-size", "64"),
    *("--no-prefix-cache", "--diagnose-window", "0.5"),
)
NUM = 8


class LongPrompts:
    """Requests at once, of prompts that take several steps each; wait() returns what a fault must not change."""

    def __init__(self, url: str):
        # One client for all: making eight takes a crowded machine longer than the server needs for the first answer.
        self._http, self._answers = httpx.Client(base_url=url, timeout=PATIENCE_S), [{}] * NUM
        self._threads = [threading.Thread(target=self._ask, args=(i,), daemon=True) for i in range(NUM)]
        for thread in self._threads:
            thread.start()

    def _ask(self, i: int) -> None:
        prompt = [3 + (7 * i + 31 * t) % 600 for t in range(100 + 60 * i)]
        body = {"prompt": prompt, "seed": i, "max_tokens": 30, "ignore_eos": True, "return_token_ids": True}
        body |= {"temperature": 0} if i % 2 else {"temperature": 0.9, "logprobs": 1}
        self._answers[i] = self._http.post("/v1/completions", json=body).json()

    def wait(self) -> list:
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._http.close()
        assert not [answer for answer in self._answers if "choices" not in answer], self._answers
        return [[(c["token_ids"], c["logprobs"]) for c in answer["choices"]] for answer in self._answers]


def test_a_lost_rank_and_a_migration_change_no_token():
    """The kill comes while prompts are computed: those of survivors are begun again, in the midst of a window."""
    with RunningServer(DEMO_V4, 4, *FLAGS, variables=PATIENT) as server:
        url, undisturbed = server.url, LongPrompts(server.url).wait()
        burst = LongPrompts(url)
        wait_until(lambda: num_sequences(url) >= NUM, "requests")
        os.kill(pid_of(url, 2), signal.SIGKILL)
        assert burst.wait() == undisturbed
        wait_lost(url, 1)
        wait_until(lambda: states(url) == ["ready"] * 4, "the return")
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            burst = LongPrompts(url)
            assert post(http, shuffled(http, 0)).status_code == 202
            assert burst.wait() == undisturbed
            assert settle(http)["migration"]["state"] == "done"
            wait_until(lambda: http.get("/v1/eprt/diagnose").json()["newest_window"], "a diagnosis of a window")
            accepted = [line for line in http.get("/metrics").text.splitlines() if "accepted_tokens_total{" in line]
        assert sum(float(line.split()[-1]) for line in accepted) > 0
        output = server.output()
        assert server.stop() == 0, output
    assert "Traceback" not in output, output
