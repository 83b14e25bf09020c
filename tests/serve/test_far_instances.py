"""Instances of another host, which shares no memory with this one: the answers of one group of ranks, whatever ends."""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from eprt import env
from eprt.serve.running import RunningServer
from tests.ranks.launch import ROOT
from tests.ranks.launch_wire import need_namespaces
from tests.serve.processes import PATIENCE_S, wait_until
from tests.serve.test_instances import ask_all, document, state_of, wait_quiet
from tests.serve.two_hosts import OtherHost, other_host
from tests.unit.cases import MODEL

HAS_NIXL = any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu13", "nixl_cu12"))
FLAGS = ("--prefill", "0", "--decode", "1", "--local-prefill-tokens", "0", "--page-size", "8", "--admin-key", "secret")


@pytest.fixture(scope="module")
def host() -> Iterator[OtherHost]:
    need_namespaces()
    with other_host() as made:
        yield made


class Here:
    """A server with an instance here, and what it answers with nobody else."""

    def __init__(self, server: RunningServer, host: OtherHost):
        self.server, self.host = server, host
        self.alone = ask_all(server, range(16))
        self.url = server.url.replace("127.0.0.1", host.here)
        self._joined: list[subprocess.Popen[str]] = []

    def join(self, role: str, *arguments: str, key: str = "secret") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "eprt.serve.join", self.url, "--role", role, "--api-key", key, *arguments]
        pipe = subprocess.PIPE
        variables = env.without_mpi()
        return subprocess.Popen([*self.host.command, *command], env=variables, stdout=pipe, stderr=pipe, text=True)

    def joined(self, role: str) -> tuple[str, subprocess.Popen[str]]:
        """The name of an instance of the other host that takes part, and the process that ends with it."""
        process = self.join(role)
        self._joined.append(process)
        assert process.stdout is not None
        name = process.stdout.readline().split()[2]
        threading.Thread(target=process.communicate, daemon=True).start()
        wait_until(lambda: state_of(self.server, name) == "ready", name)
        return name, process

    def close(self) -> None:
        """Nobody of the other host outlives the server."""
        for process in self._joined:
            process.kill()
            process.wait()

    def handoffs(self) -> dict[str, Any]:
        return wait_quiet(self.server)["handoffs"]

    def ask_while(self, lose: Callable[[], AbstractContextManager]) -> None:
        """The answers stay what they were where an instance is lost amid them, by the block's beginning."""
        before, answers = document(self.server), []
        asking = threading.Thread(target=lambda: answers.append(ask_all(self.server, range(16))))
        asking.start()
        num_done, num_lost = before["handoffs"]["num_done"], before["instances_lost"]
        wait_until(lambda: document(self.server)["handoffs"]["num_done"] > num_done, "a handoff")
        with lose():
            asking.join()
            assert answers == [self.alone]
            wait_until(lambda: document(self.server)["instances_lost"] == num_lost + 1, "its loss")
            self.handoffs()

    def leave(self, number: int) -> None:
        """A client that goes after some tokens."""
        body = {"prompt": f"Tell me {number} " * 8, "max_tokens": 100, "ignore_eos": True, "stream": True}
        url = f"{self.server.url}/v1/completions"
        with httpx.stream("POST", url, json={"model": self.server.model, **body}, timeout=PATIENCE_S) as stream:
            for i, _ in enumerate(stream.iter_lines()):
                if i >= number % 4:
                    break


@pytest.fixture(
    scope="module",
    params=["tcp", pytest.param("nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="the extra nixl is missing"))],
)
def here(request, host) -> Iterator[Here]:
    flags = (*FLAGS, "--host", "0.0.0.0", "--join-address", "0.0.0.0:0", "--page-reader", request.param)
    with RunningServer(MODEL, 0, *flags, timeout_s=2 * PATIENCE_S) as server:
        made = Here(server, host)
        yield made
        made.close()


def test_answers_are_the_same_whichever_host_computes_them(here):
    _, computes = here.joined("prefill")
    assert ask_all(here.server, range(16)) == here.alone
    done = here.handoffs()
    num_to_hand_over = sum(len(tokens) > 1 for tokens, *_ in here.alone)
    assert (done["num_done"], done["num_failed"], done["num_late"]) == (num_to_hand_over, 0, 0)
    decode, generates = here.joined("decode")
    assert ask_all(here.server, range(16)) == here.alone
    done = here.handoffs()
    assert (done["num_done"], done["num_failed"]) == (2 * num_to_hand_over, 0), "also where both are on one host"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(here.leave, range(24)))
    assert here.handoffs()["num_done"] > done["num_done"]
    left = httpx.delete(f"{here.server.url}/v1/eprt/instances/{decode}", headers={"x-api-key": "secret"})
    assert left.status_code == 202
    wait_until(lambda: state_of(here.server, decode) is None, "its end")
    assert generates.wait(PATIENCE_S) == 0
    here.ask_while(lambda: contextlib.nullcontext(computes.kill()))
    assert "eprt_faults_total 0.0" in httpx.get(f"{here.server.url}/metrics", timeout=PATIENCE_S).text


def test_a_host_whose_cable_is_pulled_costs_no_request_and_no_token(here):
    here.joined("prefill")
    here.ask_while(here.host.cut)


def test_who_does_not_fit_is_refused_by_name(here):
    with tempfile.TemporaryDirectory(dir=ROOT) as model:  # the other host has a /tmp of its own
        shutil.copytree(MODEL, model, dirs_exist_ok=True)
        file = Path(model) / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "routed_scaling_factor": 7.5}))
        for process, words in (
            (here.join("prefill", "--model", model), "another model than the server's"),
            (here.join("prefill", "--model", os.devnull), "--model /dev/null: "),
            (here.join("prefill", key="wrong"), "key"),
        ):
            _, told = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 2 and told.startswith("eprt join: error: ") and words in told, told
