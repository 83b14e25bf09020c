"""Many clients at once: a short soak and locust. The long soak is `python -m benchmarks.soak`."""

import asyncio
import subprocess
import sys
from pathlib import Path

from benchmarks.soak import soak

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
    outcome = asyncio.run(soak(server.url, num_clients=12, seconds=4))
    assert not outcome.problems, outcome.problems
    assert all(outcome.counts[kind] for kind in ("streamed", "cancelled", "answered", "refused")), outcome.counts


def test_locust(server, tmp_path: Path):
    (tmp_path / "locustfile.py").write_text(_LOCUSTFILE)
    done = subprocess.run(
        [sys.executable, "-m", "locust", "--headless", "-f", str(tmp_path / "locustfile.py"), "--host", server.url,
         "--users", "6", "--spawn-rate", "6", "--run-time", "4s", "--only-summary"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr  # locust exits 1 when a request failed
    assert "Aggregated" in done.stderr + done.stdout
