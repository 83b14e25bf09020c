"""Rank: one rank's connection, its process, and what it has reported. Knows nothing of sequences or views."""

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from eprt.engine.outputs import EngineStats
from eprt.serve.ranks import messages as msg


@dataclass(slots=True)
class Rank:
    """A process that has said Hello."""

    rank: int
    pid: int
    host: str
    transport: asyncio.Transport
    info: msg.EngineInfo | None = None  # once the model is loaded
    stats: EngineStats | None = None  # the latest
    waits: msg.WaitTotals | None = None  # the latest
    routing: asyncio.Future | None = None  # of the RoutingReply that was asked for last
    heard_s: float = field(default_factory=time.monotonic)  # of its latest message
    left: bool = False  # it said Bye
    lost: bool = False  # it went without a Bye
    pidfd: int = -1  # its process, where it runs on this host; -1: not watched

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid}, host {self.host})"

    def send(self, *messages: msg.ToRank) -> None:
        self.transport.write(b"".join(map(msg.pack, messages)))

    def watch_process(self) -> None:
        """From now on kill() and is_stopped() know the process, which must run on this host."""
        with contextlib.suppress(OSError):
            self.pidfd = os.pidfd_open(self.pid)

    def kill(self) -> None:
        """A rank that hangs must not go on later: others have its place, and its memory."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self.forget_process()

    def forget_process(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    @property
    def is_stopped(self) -> bool:
        """Whether its process stands still: by SIGSTOP, not by a debugger or for lack of a core."""
        if self.pidfd < 0:
            return False
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False
