"""A rank that is stopped for real: it is named while it stands still, also among two and three, and afterwards."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from eprt.diagnostics import analyse, read_log

from eprt.serve.running import RunningServer
from tests.serve.conftest import MODEL
from tests.serve.processes import PATIENCE_S, held, ranks_of, wait_until

BODY = {"prompt": "Tell me", "max_tokens": 64, "ignore_eos": True, "n": 8, "temperature": 1}


@contextlib.contextmanager
def under_load(num_ranks: int, *arguments: str, **variables: str) -> Iterator[RunningServer]:
    """A server that has computed some steps and has more to do."""
    done = threading.Event()

    def keep_busy() -> None:
        while not done.is_set():
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=PATIENCE_S)

    with RunningServer(MODEL, num_ranks, *arguments, variables=variables) as server:
        busy = threading.Thread(target=keep_busy)
        busy.start()
        try:
            wait_until(lambda: num_steps(server.url) > 20, "some steps")
            yield server
        finally:
            done.set()
            server.kill()
            busy.join()


def num_steps(url: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("eprt_steps_total"))


def get(url: str) -> dict:
    return httpx.get(url, timeout=PATIENCE_S).json()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_stopped_rank_is_named_while_it_stands_still(num_ranks, tmp_path):
    culprit = num_ranks - 1
    log = ("--diagnose-dir", str(tmp_path), "--diagnose-window", "2")
    with under_load(num_ranks, *log, EPRT_TIMEOUT_S="60") as server:
        pid, steps, before_s = ranks_of(server.url)[culprit], num_steps(server.url), time.time()
        wait_until(lambda: num_steps(server.url) > steps, "a step, in which nobody is waited for as long")
        with held(pid):
            health = wait_until(lambda: (h := get(f"{server.url}/health"))["status"] == "degraded" and h, "the name")
            assert f"rank {culprit} (pid {pid}, " in health["reason"] and "stopped by a signal" in health["reason"]
            first, named_s = get(f"{server.url}/v1/eprt/diagnose")["findings"][0], time.time()
            assert (first["kind"], first["rank"], first["cause"]) == ("hang", culprit, "stopped")
            assert first["active"] and first["pid"] == pid and before_s - 2 < first["t_start"] < named_s
            metrics = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
            assert f'eprt_rank_silent{{rank="{culprit}"}} 1.0' in metrics
            assert 'eprt_rank_silent{rank="0"} 0.0' in metrics
            wait_until(lambda: analyse(tmp_path).findings[:1], "the log")
            found = analyse(tmp_path).findings[0]
            assert (found.kind, found.rank, found.active, found.pid) == ("hang", culprit, True, pid)
        wait_until(lambda: get(f"{server.url}/health")["status"] == "ok", "its recovery")
        wait_until(lambda: not get(f"{server.url}/v1/eprt/diagnose")["findings"][0]["active"], "a past finding")
    for record in read_log(tmp_path).records:
        # What a rank reports may be half a second old when a window ends.
        waited_us, span_us = record.blocked_us or 0.0, 1e6 * (record.t_end - record.t_start)
        assert waited_us < span_us + 6e5, record


def test_at_the_deadline_the_headline_and_the_log_name_the_rank_that_stood_still(tmp_path):
    with under_load(3, "--diagnose-dir", str(tmp_path), EPRT_TIMEOUT_S="10") as server:
        pid = ranks_of(server.url)[1]
        with held(pid):
            server.wait_exit()
        output = server.output()
    assert f"eprt: rank 1 (pid {pid}, host" in output and "hangs, says rank" in output, output
    assert "eprt: rank 0 (" not in output and "eprt: rank 2 (" not in output, output
    first = analyse(tmp_path).findings[0]
    assert (first.kind, first.rank, first.active, first.pid) == ("hang", 1, True, pid)
    command = [sys.executable, "-m", "eprt.diagnostics", str(tmp_path), "--text"]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 1 and "hang rank 1" in told.stdout and f"pid {pid}" in told.stdout
