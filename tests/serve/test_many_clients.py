"""Many clients at once: a short soak and locust. The long soak is `python -m benchmarks.serving.soak`."""

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.serving.open_loop import OpenLoopLoad, drive, main, summary, wait_until_loaded
from benchmarks.serving.soak import soak

_LOCUSTFILE = """
from locust import HttpUser, task

class Chatter(HttpUser):
    @task
    def chat(self):
        body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
        with self.client.post("/v1/chat/completions", json=body, catch_response=True) as response:
            if response.json()["choices"][0]["message"]["content"] != "17 + 25 = 42":
                response.failure(response.text)
"""


def test_soak(server):
    for seconds in (4, 20, 100):  # the longer ones where the machine is crowded
        outcome = asyncio.run(soak(server.url, num_clients=12, seconds=seconds))
        assert not outcome.problems, outcome.problems
        if has_all := all(outcome.counts[kind] for kind in ("streamed", "cancelled", "answered", "refused")):
            break
    assert has_all, outcome.counts


def test_locust(server, tmp_path: Path):
    (tmp_path / "locustfile.py").write_text(_LOCUSTFILE)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "locust",
            "--headless",
            "-f",
            str(tmp_path / "locustfile.py"),
            "--host",
            server.url,
            "--users",
            "6",
            "--spawn-rate",
            "6",
            "--run-time",
            "4s",
            "--only-summary",
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr  # locust exits 1 when a request failed
    assert "Aggregated" in done.stderr + done.stdout


def test_open_loop_load_measures_what_it_says(server):
    load = OpenLoopLoad(rate=8, seconds=2, input_tokens=20, output_tokens=6, spread=0.5, max_token_id=100, seed=3)
    assert load.requests() == load.requests() and len(load.requests()) == 16
    served, took_s = asyncio.run(drive(server.url, "demo", load))
    assert [one.wanted for one in served] == [body["max_tokens"] for _, body in load.requests()]
    assert all(one.error is None and 0 < one.ttft_s < took_s and min(one.itl_s, default=0) >= 0 for one in served)
    row = summary(load, served, took_s)
    assert row["failed"] == 0 and row["ttft_p50_ms"] <= row["ttft_p99_ms"]
    assert row["tokens_s"] == pytest.approx(sum(one.wanted for one in served) / took_s)
    loosest, strictest = row["goodput_2s_70ms"], row["goodput_1s_30ms"]
    assert 0 <= strictest <= loosest <= len(served) / took_s


def test_open_loop_load_counts_failures(server):
    too_long = OpenLoopLoad(rate=20, seconds=0.1, input_tokens=10**5, output_tokens=1, spread=0, max_token_id=9, seed=0)
    served, took_s = asyncio.run(drive(server.url, "demo", too_long))
    assert len(served) == 2 and all(one.error and one.error.startswith("400: ") for one in served)
    assert summary(too_long, served, took_s)["failed"] == 2


def test_open_loop_load_refuses_in_one_line(capsys):
    assert main(["--url", "http://127.0.0.1:9", "--rate", "1"]) == 2
    assert main(["--rate", "0"]) == 2
    err = capsys.readouterr().err
    assert "no OpenAI-compatible server answers there" in err and "--rate [0.0]: must be above 0" in err


def test_open_loop_load_waits_for_a_server_that_loads(monkeypatch):
    answers = [httpx.Response(503, json={"status": "loading"})] * 2 + [httpx.Response(200, json={"status": "ok"})]
    monkeypatch.setattr("benchmarks.serving.open_loop.httpx.get", lambda url, timeout: answers.pop(0))
    monkeypatch.setattr("benchmarks.serving.open_loop.time.sleep", lambda seconds: None)
    wait_until_loaded("http://127.0.0.1:8000")
    assert not answers
    answers += [httpx.Response(503, json={"status": "loading"})] * 2
    with pytest.raises(ValueError, match="still loading after"):
        wait_until_loaded("http://127.0.0.1:8000", timeout_s=-1e-9)
