"""Processes of ranks that are forks of one which has imported torch, so that they start in no time.

Knows nothing of how ranks find each other.
"""

import multiprocessing
import os
import select
import subprocess
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["pytest", "torch.distributed", "eprt.engine.engine", "tests.ranks.cases_ep_wait", "tests.ranks.cases_engine"]
)


class ForkedRank:
    """What tests use of a subprocess.Popen with stdout=PIPE, stderr=STDOUT.

    Args:
        main: a function of a module, called in the process with the numbers there of fds, then with the arguments.
        environment: all that the process finds in os.environ.
        fds: descriptors of this process.
    """

    def __init__(
        self, main: Callable[..., None], *arguments: str, environment: dict[str, str], fds: tuple[int, ...] = ()
    ):
        self.stdout, writer = _CONTEXT.Pipe(duplex=False)
        passed = [Connection(os.dup(fd)) for fd in fds]
        self._process = _CONTEXT.Process(target=_run, args=(main, arguments, environment, writer, passed), daemon=True)
        self._process.start()
        for connection in (writer, *passed):
            connection.close()

    @property
    def returncode(self) -> int | None:
        """Minus the signal that killed it."""
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """All that was written and not read yet, once the process has ended."""
        deadline_s, said = time.monotonic() + timeout, b""
        while True:
            if not select.select([self.stdout], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise subprocess.TimeoutExpired(self._process.name, timeout, said)
            if not (part := os.read(self.stdout.fileno(), 1 << 16)):
                break
            said += part
        self._process.join(max(0.1, deadline_s - time.monotonic()))
        return said.decode(errors="replace"), None

    def read_line(self) -> str:
        """The next line of its output."""
        line = b""
        while not line.endswith(b"\n") and (byte := os.read(self.stdout.fileno(), 1)):
            line += byte
        return line.decode()

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def _run(
    main: Callable[..., None],
    arguments: tuple[str, ...],
    environment: dict[str, str],
    output: Connection,
    passed: list[Connection],
) -> None:
    import torch

    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()  # the end of the process is then the end of its output
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    numbers: list[Any] = [connection.fileno() for connection in passed]
    main(*numbers, *arguments)
