"""A server's processes, and how a test holds one of them still for as long as it looks."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

# Of every wait for something that comes by itself: as long as nothing but a fault takes on the most crowded machine.
PATIENCE_S = 100.0
# For servers of which a test holds a rank: the others wait for it.
PATIENT = {"EPRT_TIMEOUT_S": "250"}


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """What condition() returned once it was true."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.02)
    return value


def family(process: psutil.Process) -> list[psutil.Process]:
    """The process and everything it started, the frontend in its session of its own included."""
    return [process, *process.children(recursive=True)]


def listening(process: psutil.Process) -> dict[str, list[str]]:
    """Program name -> addresses on which it and what it started listen, by TCP."""
    found: dict[str, list[str]] = {}
    for one in family(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in one.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.setdefault(one.name(), []).append(connection.laddr.ip)
    return found


def assert_nothing_left(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive, f"still running: {[(p.pid, p.cmdline()) for p in alive]}"


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=PATIENCE_S)


def ranks_of(url: str) -> dict[int, int]:
    """rank -> pid."""
    return {r["rank"]: r["pid"] for r in get(f"{url}/health").json()["ranks"]}


def num_sequences(url: str) -> int:
    """Those handed to the ranks and not ended, as the frontend counts them."""
    (line,) = [line for line in get(f"{url}/metrics").text.splitlines() if line.startswith("eprt_sequences ")]
    return int(float(line.split()[1]))


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """The process stands still. A rank's: no rank ends a step meanwhile, and the frontend serves on."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "its stop")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # the test may have killed it
            os.kill(pid, signal.SIGCONT)
