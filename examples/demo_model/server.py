"""Run eprt's server on the demo checkpoint for as long as a block lasts."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

STOP_TIMEOUT_S = 20.0


@contextlib.contextmanager
def running_server(checkpoint: Path, num_ranks: int, timeout_s: float = 300.0) -> Iterator[str]:
    """Start `num_ranks` ranks on a free port, wait until they are healthy, and give the root URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # With -n the server starts mpirun itself and drains on SIGTERM.
    command = [sys.executable, "-m", "eprt.serve", "-n", str(num_ranks)]
    command += ["--model", str(checkpoint), "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(url, process, timeout_s)
        yield url
    finally:
        _stop(process)


def _wait_until_healthy(url: str, process: subprocess.Popen, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConnectionError(f"the server ended with status {process.returncode} before it was healthy")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            if response.status == 200:
                return
        time.sleep(0.2)
    raise TimeoutError(f"{url}/health did not answer 200 within {timeout_s:.0f} s")


def _stop(process: subprocess.Popen) -> None:
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
            return
