"""One server of four ranks for all tests that only talk to it."""

from pathlib import Path

import httpx
import pytest

from eprt.serve.running import RunningServer
from tests.serve.processes import PATIENCE_S, PATIENT

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "checkpoint"

# Tests wait for these: a request body takes milliseconds here, and a window of the diagnosis is to close soon.
WAITS = ("--body-timeout", "3", "--diagnose-window", "1")


# An answer in which every token counts: what moving experts must not change.
COUNTING = {
    "model": "demo",
    "prompt": "Count from 3 to 60.",
    "max_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


def token_ids(http: httpx.Client) -> list[int]:
    """Of the answer to COUNTING."""
    response = http.post("/v1/completions", json=COUNTING)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


@pytest.fixture(scope="session")
def server():
    with RunningServer(
        MODEL, 4, "--served-model-name", "demo", "--max-num-seqs", "16", "--max-queue", "8", *WAITS, variables=PATIENT
    ) as running:
        yield running
    status = running.process.returncode
    assert status == 0, f"the drained server ended with {status}"


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def client(server):
    import openai  # tests on GPUs use what stands here, too, without it

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
