"""A server on two hosts of namespaces: its launchers, what they print, and clients that are on host 0."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from eprt import env
from tests.ranks.launch import ROOT
from tests.ranks.launch_wire import KEY
from tests.serve.conftest import MODEL
from tests.serve.processes import PATIENCE_S, assert_nothing_left, family, wait_until

_CLONE_NEWNET = 0x40000000
T = TypeVar("T")


class HostsServer:
    """Two launchers. hosts: addresses and commands, as two_hosts() yields them."""

    def __init__(self, hosts: tuple[list[str], list[list[str]]], port: int, *arguments: str, num_ranks: int = 2):
        self._addresses, self._commands = hosts
        self._port = port
        self._arguments = ("-n", str(num_ranks), "--port", "0", *arguments)
        self._logs = [tempfile.NamedTemporaryFile(prefix=f"eprt-host-{i}-", suffix=".log") for i in range(2)]  # noqa: SIM115
        self.launchers: list[subprocess.Popen] = []

    def start_host(self, host: int, *arguments: str, variables: dict[str, str] | None = None) -> None:
        """The launcher of this host; further arguments win."""
        meeting = ["--nnodes", "2", "--node-rank", str(host), "--dist-init-addr", f"{self._addresses[0]}:{self._port}"]
        given = ["--model", str(MODEL), *self._arguments, *meeting, *arguments]
        process = subprocess.Popen(
            [*self._commands[host], sys.executable, "-m", "eprt.serve", *given],
            cwd=ROOT,
            env={**env.without_mpi(), "EPRT_GROUP_KEY": KEY, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._logs[host],
            stderr=subprocess.STDOUT,
        )
        self.launchers.append(process)

    def said(self, host: int) -> str:
        return Path(self._logs[host].name).read_text(errors="replace")

    def wait_ready(self) -> str:
        """The URL, on host 0."""

        def url() -> str | None:
            ended = [p for p in self.launchers if p.poll() is not None]
            assert not ended, [self.said(0), self.said(1)]
            found = re.search(r"^eprt serving \S+ on (http://\S+), \d+ ranks$", self.said(0), re.M)
            return found[1] if found else None

        return wait_until(url, "a server on two hosts")

    def processes(self) -> list[psutil.Process]:
        """All of both hosts, with those that only make the namespaces."""
        return [one for launcher in self.launchers for one in family(psutil.Process(launcher.pid))]

    def find(self, *words: str) -> psutil.Process:
        """The one process whose command line has these words one after another."""
        (found,) = [p for p in self.processes() if _has(p.cmdline(), words)]
        return found

    def launcher_of(self, host: int) -> psutil.Process:
        return self.find("--node-rank", str(host))

    def on_first_host(self, call: Callable[[], T]) -> T:
        """call() with host 0's network."""
        result: list[Any] = []

        def run() -> None:
            with open(f"/run/netns/{self._commands[0][3]}") as space:
                libc = ctypes.CDLL(None, use_errno=True)
                assert libc.setns(space.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                result.append((call(), None))
            except BaseException as error:
                result.append((None, error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        value, error = result[0]
        if error is not None:
            raise error
        return value

    def wait_ended(self, processes: Sequence[psutil.Process] = ()) -> list[int]:
        """The exit statuses of the launchers that were started; nothing of what was there is left."""
        deadline_s = time.monotonic() + PATIENCE_S
        statuses = []
        for launcher in self.launchers:
            try:
                statuses.append(launcher.wait(max(0.1, deadline_s - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError([self.said(0), self.said(1)]) from None
        assert_nothing_left(list(processes))
        return statuses

    def close(self) -> None:
        for launcher in self.launchers:
            if launcher.poll() is None:  # the namespace goes with its first process, and all others with it
                for one in family(psutil.Process(launcher.pid)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.send_signal(signal.SIGKILL)
            launcher.wait()
        for log in self._logs:
            log.close()


def _has(command: list[str], words: tuple[str, ...]) -> bool:
    places = range(len(command) - len(words) + 1)
    return command[0] == sys.executable and any(tuple(command[i : i + len(words)]) == words for i in places)
