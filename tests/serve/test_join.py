"""Ranks that are lost, come back and retire, with real processes: `eprt join`, the launcher's restarts, and what both
refuse."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from eprt.serve.running import RunningServer
from tests.serve.conftest import COUNTING, MODEL, token_ids
from tests.serve.processes import PATIENCE_S, PATIENT, assert_nothing_left, family, get, wait_until

ELASTIC = ("--max-lost-ranks", "1", "--num-redundant-experts", "32", "--served-model-name", COUNTING["model"])


def states(url: str) -> dict[int, str]:
    return {slot["rank"]: slot["state"] for slot in get(f"{url}/v1/eprt/ranks").json()["ranks"]}


def wait_state(url: str, rank: int, state: str) -> None:
    wait_until(lambda: states(url)[rank] == state, f"rank {rank} {state}")


def pids(url: str) -> dict[int, int]:
    return {slot["rank"]: slot["pid"] for slot in get(f"{url}/v1/eprt/ranks").json()["ranks"]}


@contextlib.contextmanager
def elastic(num_ranks: int, *arguments: str) -> Iterator[tuple[RunningServer, httpx.Client]]:
    """A server that can lose a rank; when the block ends it drains, and nothing of it is left."""
    with RunningServer(MODEL, num_ranks, *ELASTIC, *arguments, variables=PATIENT) as server:
        processes = family(psutil.Process(server.process.pid))
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
            yield server, http
            processes += [psutil.Process(pid) for pid in pids(server.url).values() if psutil.pid_exists(pid)]
        assert server.stop() == 0, server.output()
        assert "Traceback" not in server.output(), server.output()
    assert_nothing_left(processes)


def join(url: str, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "eprt.serve.join", url, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def refusal(url: str, *arguments: str) -> str:
    """What `eprt join` says in its one line; it ends with 2."""
    process = join(url, *arguments)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2 and said.startswith("eprt join: error: ") and said.count("\n") == 1, said
    return said


def other_weights(folder: Path) -> Path:
    """The model's directory again, with other weights of one expert."""
    for file in MODEL.iterdir():
        shutil.copy(file, folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    first = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:first]))
    start, end = next(entry["data_offsets"] for name, entry in header.items() if ".experts." in name)
    data[first + start : first + end] = bytes(reversed(data[first + start : first + end]))
    path.write_bytes(data)
    return folder


def test_a_process_joins_in_the_place_of_a_lost_rank_and_retires(tmp_path):
    other_model = str(other_weights(tmp_path))
    with elastic(3) as (server, http):
        url, expected = server.url, token_ids(http)
        assert "there is no place to join" in refusal(url)
        victim = pids(url)[1]
        os.kill(victim, signal.SIGKILL)
        wait_state(url, 1, "gone")
        assert "--rank 0: that rank runs" in refusal(url, "--rank", "0")
        assert "another model than the server's" in refusal(url, "--model", other_model)
        assert token_ids(http) == expected
        joined = join(url, "--rank", "1", "--model", str(MODEL))
        wait_state(url, 1, "ready")
        assert "--rank 1: that rank runs" in refusal(url, "--rank", "1")
        assert [token_ids(http) for _ in range(3)] == [expected] * 3  # one on each rank
        joined.send_signal(signal.SIGINT)
        said, _ = joined.communicate(timeout=PATIENCE_S)
        assert joined.returncode == 0 and said.startswith("eprt: rank 1 (pid "), said
        wait_state(url, 1, "gone")
        assert token_ids(http) == expected
        both = [join(url, "--rank", "1") for _ in range(2)]  # at the same moment
        wait_state(url, 1, "ready")
        wait_until(lambda: any(one.poll() is not None for one in both), "a refusal")
        (refused,) = [one for one in both if one.poll() is not None]
        assert refused.returncode == 2 and "--rank 1: that rank runs (pid " in refused.communicate()[1]
        (joined,) = [one for one in both if one is not refused]
        os.kill(pids(url)[1], signal.SIGTERM)  # the rank itself: it alone leaves
        assert joined.wait(PATIENCE_S) == 0 and token_ids(http) == expected
        wait_state(url, 1, "gone")
        output = server.output()
        assert f"eprt: rank 1 (pid {victim}) ended: killed by signal 9\n" in output, output
        assert "joins\n" in output and set(states(url).values()) == {"ready", "gone"}


def test_lost_experts_come_from_host_memory(tmp_path):
    for file in MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    flags = ("--max-lost-ranks", "1", "--num-redundant-experts", "32", "--expert-host-copies", "node")
    with RunningServer(tmp_path, 2, *flags, "--served-model-name", COUNTING["model"], variables=PATIENT) as server:
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
            expected = token_ids(http)
            for file in tmp_path.glob("*.safetensors"):
                file.unlink()
            os.kill(pids(server.url)[0], signal.SIGKILL)
            assert token_ids(http) == expected
        assert server.stop() == 0, server.output()
        assert "copies of all experts: " in server.output()


def test_the_launcher_starts_a_lost_rank_again():
    with elastic(2, "--restart-lost-ranks") as (server, http):
        url, expected = server.url, token_ids(http)
        for rank in (0, 1):
            victim = pids(url)[rank]
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda v=victim, r=rank: pids(url)[r] != v, "another process")
            wait_state(url, rank, "ready")
            assert token_ids(http) == expected
            assert f"eprt: rank {rank} (pid {victim}) ended: killed by signal 9; it is started again in 1 s" in (
                server.output()
            )


def test_a_server_that_nobody_can_join_says_so(server):
    assert "no server of this host with --max-lost-ranks or --decode takes ranks at port" in refusal(server.url)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["-n", "2", "--max-lost-ranks", "2"], "--max-lost-ranks 2: must be in 0..1 with -n 2"),
        (["-n", "4", "--max-lost-ranks", "1"], "--num-redundant-experts "),
        (["-n", "2", "--restart-lost-ranks"], "--restart-lost-ranks needs --max-lost-ranks of at least 1"),
        (["-n", "1", "--max-lost-ranks", "1"], "--max-lost-ranks 1: must be in 0..0 with -n 1"),
        (["--max-lost-ranks", "1"], "needs ranks that eprt starts on one host; give -n, and leave out mpirun"),
    ],
)
def test_losses_that_cannot_be_survived_are_refused_at_the_start(arguments, words):
    command = [sys.executable, "-m", "eprt.serve", "--model", str(MODEL), "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2 and done.stderr.startswith("eprt serve: error: ") and words in done.stderr, done
    assert done.stderr.count("\n") == 1
