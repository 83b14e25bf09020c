"""One server of four ranks for all tests that only talk to it."""

from pathlib import Path

import pytest

from eprt.serve.running import RunningServer

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "checkpoint"

# Tests wait for these: a request body takes milliseconds here, and a window of the diagnosis is to close soon.
WAITS = ("--body-timeout", "3", "--diagnose-window", "1")


@pytest.fixture(scope="session")
def server():
    with RunningServer(
        MODEL, 4, "--served-model-name", "demo", "--max-num-seqs", "16", "--max-queue", "8", *WAITS
    ) as running:
        yield running
    status = running.process.returncode
    assert status == 0, f"the drained server ended with {status}"
