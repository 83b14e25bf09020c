"""RunningServer: a server for as long as a block lasts: for tests, benchmarks and scripts.

with RunningServer("path/to/checkpoint", num_ranks=4) as server:
    requests.get(server.url + "/health")

Knows nothing of the server but its command line and the line that it prints when it is ready.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from eprt import env
from eprt.mpirun import mpirun_command

_ANNOUNCEMENT = re.compile(r"^eprt serving (.+) on (https?://\S+), (\d+) ranks?$", re.MULTILINE)


class RunningServer:
    """Starts on construction; `wait_ready` (or entering the block) returns when requests are served.

    Args:
        num_ranks: 0 where the arguments say how many.
        arguments: more flags of `eprt serve`.
        under: "launcher" (python -m eprt.serve -n N) or "mpirun" (mpirun -n N python -m eprt.serve).
        variables: more environment variables.
        timeout_s: within which the server must be ready.
    """

    def __init__(
        self,
        model_dir: str | Path,
        num_ranks: int = 1,
        *arguments: str,
        under: str = "launcher",
        variables: dict[str, str] | None = None,
        timeout_s: float = 120.0,
    ):
        python = [sys.executable, "-m", "eprt.serve", "--model", str(model_dir), "--port", "0", *arguments]
        if under == "launcher":
            command = [*python, *(["-n", str(num_ranks)] if num_ranks else [])]
        else:
            command = mpirun_command("-n", str(num_ranks), *python)
        self._output = tempfile.NamedTemporaryFile(prefix="eprt-server-", suffix=".log")  # noqa: SIM115
        self._timeout_s = timeout_s
        self.url = self.model = ""  # known once the server is ready
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**env.mpi_environment(), **(variables or {})},
            start_new_session=True,
        )

    def output(self) -> str:
        """Everything the server has printed so far."""
        return Path(self._output.name).read_text(errors="replace")

    def wait_ready(self) -> "RunningServer":
        deadline_s = time.monotonic() + self._timeout_s
        while not (announced := _ANNOUNCEMENT.search(self.output())):
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}; it printed:\n{self.output()}")
            if time.monotonic() > deadline_s:
                self.kill()
                raise TimeoutError(
                    f"the server was not ready within {self._timeout_s:g} s; it printed:\n{self.output()}"
                )
            time.sleep(0.1)
        self.model, self.url = announced[1], announced[2]
        return self

    def wait_exit(self, timeout_s: float = 60.0) -> int:
        """The exit status; TimeoutError with what was printed where the server does not end."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the server still runs after {timeout_s:g} s; it printed:\n{self.output()}") from None

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, then the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait_exit(timeout_s)

    def kill(self) -> None:
        """Ends the server at once, mpirun and ranks too; their frontend ends by itself."""
        if self.process.poll() is None:
            # The launcher kills everything at its third signal, mpirun at its second.
            for _ in range(3):
                self.process.send_signal(signal.SIGTERM)
                time.sleep(0.1)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def __enter__(self) -> "RunningServer":
        return self.wait_ready()

    def __exit__(self, *exc_info) -> None:
        try:
            self.stop()
        except TimeoutError:
            self.kill()
            raise
        finally:
            self._output.close()
