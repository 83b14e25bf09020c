"""Starting, draining, and losing parts of a server, with real processes and signals."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from eprt import env
from eprt.mpirun import mpirun_command
from eprt.serve.running import RunningServer
from tests.serve.conftest import MODEL
from tests.serve.processes import (
    PATIENCE_S,
    PATIENT,
    assert_nothing_left,
    family,
    get,
    held,
    listening,
    num_sequences,
    ranks_of,
    wait_until,
)

LONG = {"prompt": "Tell me", "max_tokens": 1500, "ignore_eos": True, "stream": True}


class Stream(threading.Thread):
    """A client that reads one stream to its end. events: decoded; failure: a broken connection."""

    def __init__(self, url: str, **changes):
        super().__init__(daemon=True)
        self.url, self.body = url, {**LONG, **changes}
        self.events: list = []
        self.started = threading.Event()
        self.failure: Exception | None = None
        self.start()
        assert self.started.wait(PATIENCE_S), f"no first event within {PATIENCE_S:g} s"

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=self.body, timeout=PATIENCE_S) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        data = line.removeprefix("data: ")
                        self.events.append(data if data == "[DONE]" else json.loads(data))
                        self.started.set()
        except httpx.HTTPError as error:
            self.failure = error
        self.started.set()

    @property
    def finish_reason(self):
        return self.events[-2]["choices"][0]["finish_reason"]


def all_tell_of_lost_rank(streams: list[Stream], rank: int, pid: int, timeout_s: float) -> None:
    """Every stream ends within the time, whole, with an event that names the rank."""
    for stream in streams:
        stream.join(timeout_s)
        assert not stream.is_alive() and stream.failure is None
        assert stream.events[-1] == "[DONE]" and stream.events[-2]["error"]["code"] == "rank_lost"
        assert f"rank {rank} (pid {pid}" in stream.events[-2]["error"]["message"]


def shared_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


# What FEW lets run at once is always less than CROWD asks for: it ends in minutes, and a test need not hurry.
FEW = ("--max-num-seqs", "2", "--drain-timeout", "200")
CROWD = {"n": 50, "max_tokens": 2000}


@contextlib.contextmanager
def crowded(url: str) -> Iterator[None]:
    """The server has work until the block ends, which takes it back."""
    body = {**LONG, **CROWD}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()  # dropping it would close the stream
        assert next(lines)
        yield


class LastWords(threading.Thread):
    """Asks without a break, so that it hears what a server says in the seconds between losing a rank and its end.

    health, refused: the answers of the first such moment.
    """

    def __init__(self, url: str):
        super().__init__(daemon=True)
        self.url = url
        self.health = self.refused = httpx.Response(0)
        self.start()

    def run(self) -> None:
        with contextlib.suppress(httpx.TransportError), httpx.Client(base_url=self.url, timeout=PATIENCE_S) as http:
            while (health := http.get("/health")).status_code == 200:
                time.sleep(0.01)
            self.health = health
            self.refused = http.post("/v1/completions", json={"prompt": "late"})


def post(url: str, body: dict) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


def until_unhealthy(url: str) -> httpx.Response:
    return wait_until(lambda: health if (health := get(f"{url}/health")).status_code != 200 else None, "no health")


def test_launcher_told_to_stop_while_it_loads_exits_0():
    server = RunningServer(MODEL, 2)

    def ranks() -> list[psutil.Process]:
        return [p for p in family(psutil.Process(server.process.pid)) if "eprt.serve.ranks" in p.cmdline()]

    # One that stands still has not loaded.
    processes = wait_until(lambda: len(found := ranks()) >= 2 and found, "the ranks")
    with held(processes[0].pid):
        processes = family(psutil.Process(server.process.pid))
        assert "eprt serving" not in server.output()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert server.wait_exit() == 0, server.output()
    assert "eprt serving" not in server.output() and "Traceback" not in server.output()
    assert_nothing_left(processes)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_launcher_drains_and_exits_0(number):
    with RunningServer(MODEL, 2, *FEW) as server:
        processes = family(psutil.Process(server.process.pid))
        stream = Stream(server.url, max_tokens=300)
        with crowded(server.url):
            server.process.send_signal(number)
            health = until_unhealthy(server.url)
            refused = post(server.url, {"prompt": "late"})
        stream.join(PATIENCE_S)
        status = server.wait_exit()
        assert stream.failure is None and stream.finish_reason == "length" and stream.events[-1] == "[DONE]"
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert health.status_code == 503 and health.json()["status"] == "draining"
        assert status == 0, server.output()
        assert "SIGTERM: up to 200 s for running sequences: 5" in server.output()
        assert "Traceback" not in server.output()
        assert_nothing_left(processes)


def test_mpirun_drains_on_sigusr1_and_time_runs_out():
    with RunningServer(MODEL, 2, *FEW, "--drain-timeout", "0.5", under="mpirun") as server:
        stream = Stream(server.url, **CROWD)
        server.process.send_signal(signal.SIGUSR1)
        stream.join(PATIENCE_S)
        assert server.wait_exit() == 0, server.output()
        assert stream.failure is None and stream.finish_reason == "abort" and stream.events[-1] == "[DONE]"


def test_mpirun_told_to_stop_tells_the_clients():
    with RunningServer(MODEL, 2, *FEW, under="mpirun") as server:
        processes = family(psutil.Process(server.process.pid))
        abroad = {name: ips for name, ips in listening(processes[0]).items() if set(ips) != {"127.0.0.1"}}
        assert set(abroad) <= {"prterun"}, (
            "mpirun's own port cannot be switched off; nobody else listens to the network"
        )
        stream = Stream(server.url, **CROWD)
        server.process.send_signal(signal.SIGTERM)
        stream.join(PATIENCE_S)
        assert server.wait_exit() == 1
        assert stream.failure is None and stream.events[-1] == "[DONE]"
        assert stream.events[-2]["error"]["code"] == "rank_lost"
        assert_nothing_left(processes)


def test_killed_rank_is_named_and_nobody_hangs():
    before = shared_files()
    # Were it the deadline of waits that ends them, it would be after this test.
    with RunningServer(MODEL, 4, "--max-num-seqs", "8", under="mpirun", variables=PATIENT) as server:
        processes = family(psutil.Process(server.process.pid))
        last_words = LastWords(server.url)
        streams = [Stream(server.url, n=6, max_tokens=2000) for _ in range(5)]  # all at once: 4 x 8
        waiting: list[httpx.Response] = []
        plain = threading.Thread(target=lambda: waiting.append(post(server.url, {**LONG, **CROWD, "stream": False})))
        plain.start()
        wait_until(lambda: num_sequences(server.url) > 5 * 6, "the sixth request")
        pid = ranks_of(server.url)[2]
        os.kill(pid, signal.SIGKILL)
        for thread in (plain, last_words):
            thread.join(PATIENCE_S)
        all_tell_of_lost_rank(streams, 2, pid, PATIENCE_S)
        assert waiting[0].status_code == 500 and waiting[0].json()["error"]["code"] == "rank_lost"
        health, refused = last_words.health, last_words.refused
        assert health.status_code == 503 and "rank 2" in health.json()["reason"]
        assert refused.status_code == 503 and "rank 2" in refused.json()["error"]["message"]
        assert server.wait_exit() != 0
        said = [line for line in server.output().splitlines() if line.startswith("eprt: ")]
        assert len(said) == 1 and said[0].startswith(f"eprt: rank 2 (pid {pid}, host ")
        assert "6 requests ended with an error" in said[0]
        assert "Traceback" not in server.output()
        assert_nothing_left(processes)
    # What other tests put there meanwhile is none of ours.
    numbers = {number for name in shared_files() - before for number in re.findall(r"\d+", name)}
    assert not numbers & {str(p.pid) for p in processes}, shared_files() - before


def test_killed_frontend_ends_the_ranks():
    with RunningServer(MODEL, 2) as server:
        processes = family(psutil.Process(server.process.pid))
        frontend = next(p for p in processes if "eprt.serve.frontend" in p.cmdline())
        frontend.kill()
        assert server.wait_exit() == 1
        said = [line for line in server.output().splitlines() if line.startswith("eprt: ")]
        assert said == [f"eprt: the HTTP frontend (pid {frontend.pid}) was lost: killed by signal 9; stopping"]
        assert_nothing_left(processes)


@pytest.mark.parametrize("victim", ["mpirun", "launcher"])
def test_a_server_whose_starter_was_killed_drains(victim):
    # Not the block's own exit: it would send signals to what is dead.
    server = RunningServer(MODEL, 2, *FEW, under=victim).wait_ready()
    processes = family(psutil.Process(server.process.pid))
    maps = Path(f"/proc/{ranks_of(server.url)[0]}/maps").read_text()
    segments = {Path(word) for word in maps.split() if word.startswith("/dev/shm/sm_segment")}
    stream = Stream(server.url, max_tokens=200)
    with crowded(server.url):
        os.kill(server.process.pid, signal.SIGKILL)
        health = until_unhealthy(server.url)
    stream.join(PATIENCE_S)
    assert health.status_code == 503 and health.json()["status"] == "draining"
    assert stream.failure is None and stream.finish_reason == "length" and stream.events[-1] == "[DONE]"
    server.wait_exit()
    assert_nothing_left(processes)
    # Open MPI leaves its own files to mpirun, which is no more.
    for segment in segments:
        segment.unlink(missing_ok=True)
    shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{server.process.pid}", ignore_errors=True)


def _serve(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "eprt.serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.fixture
def used_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


def test_what_is_wrong_at_the_start_is_one_line(used_port, tmp_path):
    (tmp_path / "config.json").write_text((MODEL / "config.json").read_text())
    for arguments, words in (
        (["--model", "/nowhere"], "--model /nowhere: no such directory"),
        (["--model", str(tmp_path)], "has no tokenizer.json"),
        (["--model", str(MODEL), "--port", str(used_port)], f"cannot listen on 127.0.0.1:{used_port}"),
        (["--model", str(MODEL), "--port", "-1"], "--port -1: must be in 0..65535"),
        (
            ["--model", str(MODEL), "--port", "0", "--diagnose-dir", "/dev/null/x"],
            "--diagnose-dir /dev/null/x: the log ca",
        ),
        (["--model", str(MODEL), "--dtype", "int3"], "--dtype int3"),
        (["--model", str(MODEL), "--kv-cache-gb", "x"], "--kv-cache-gb"),
        (["--model", str(MODEL), "--max-num-seq", "3"], "--max-num-seq"),
        ([], "--model"),
    ):
        done = _serve("-n", "2", *arguments)
        assert done.returncode == 2, (arguments, done)
        lines = done.stderr.splitlines()
        assert len(lines) == 1 and lines[0].startswith("eprt serve: error: ") and words in lines[0], (arguments, lines)


def test_a_mistake_under_mpirun_is_told_once(used_port):
    with pytest.raises(RuntimeError) as caught, RunningServer(Path("/nowhere"), 3, under="mpirun"):
        pass
    assert str(caught.value).count("eprt serve: error: --model /nowhere: no such directory") == 1


def test_a_mistake_is_told_even_when_rank_0_starts_last():
    serve = f"exec {sys.executable} -m eprt.serve --model /nowhere"
    done = _mpirun("-n", "1", "sh", "-c", f"sleep 2; {serve}", ":", "-n", "2", "sh", "-c", serve)
    assert done.returncode == 2, done
    assert done.stderr.count("--model /nowhere: no such directory") == 1, done.stderr


def test_a_mistake_that_rank_0_does_not_share_is_told_with_the_rank():
    serve = f"exec {sys.executable} -m eprt.serve --port 0 --model"
    done = _mpirun("-n", "1", "sh", "-c", f"{serve} {MODEL}", ":", "-n", "1", "sh", "-c", f"{serve} /nowhere")
    assert done.returncode == 2, done
    told = f"eprt serve: error: rank 1 on {socket.gethostname()}: --model /nowhere: no such directory"
    assert done.stderr.count(told) == 1, done.stderr


def test_two_numbers_of_ranks_are_told_once():
    done = _mpirun("-n", "3", sys.executable, "-m", "eprt.serve", "--model", str(MODEL), "--port", "0", "-n", "2")
    assert done.returncode == 2, done
    assert done.stderr.count("eprt serve: error: -n 2: this is an MPI job of 3 ranks already; leave out -n") == 1, done


def test_ranks_with_different_flags_are_told_once():
    serve = [sys.executable, "-m", "eprt.serve", "--model", str(MODEL), "--port", "0"]
    done = _mpirun("-n", "2", *serve, ":", "-n", "1", *serve, "--overlap", "tbo")
    assert done.returncode == 2, done
    told = "eprt serve: error: rank 2 has --overlap tbo, rank 0 has auto; give all ranks the same flags"
    assert done.stderr.count(told) == 1 and "Traceback" not in done.stderr, done.stderr


def _mpirun(*arguments: str) -> subprocess.CompletedProcess:
    command, environment = mpirun_command(*arguments), env.mpi_environment()
    patience_s = 3 * PATIENCE_S  # ranks that wait for each other in MPI spin, beside those that still load
    return subprocess.run(command, capture_output=True, text=True, timeout=patience_s, check=False, env=environment)


def test_weights_behind_a_link_that_leads_nowhere_end_the_server(tmp_path):
    for file in MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file.name if file.suffix == ".safetensors" else file)
    with (
        pytest.raises(RuntimeError, match=r"symbolic links: .*model\.safetensors") as caught,
        RunningServer(tmp_path, 2),
    ):
        pass
    assert "cannot join" not in str(caught.value) and "Traceback" not in str(caught.value)


def test_a_broken_checkpoint_is_told_once(tmp_path):
    for file in MODEL.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 7}))
    with pytest.raises(RuntimeError) as caught, RunningServer(tmp_path, 2):
        pass
    message = str(caught.value)
    said = [line for line in message.splitlines() if line.startswith("eprt: ")]
    assert len(said) == 1 and "failed:" in said[0] and "Traceback" not in message, message
    assert "model.layers.0.mlp.gate_proj.weight is [384, 256], expected [7, 256]" in message
