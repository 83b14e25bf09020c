"""Rank: one rank's connection, its process, and what it has reported. Knows nothing of sequences or views."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from eprt.dead_host import notice_dead_host
from eprt.diagnostics.log.standing import Standing
from eprt.engine.outputs import EngineStats
from eprt.serve.ranks import messages as msg

_COMPUTES = 0.2  # of a core
_PROCESS_STATES = {"T": "stopped", "t": "traced", "D": "disk", "Z": "ended", "X": "ended"}  # as in proc(5)


@dataclass(slots=True)
class Rank:
    """A process that has said Hello."""

    rank: int
    pid: int
    host: str
    transport: asyncio.Transport
    loading: msg.Loading | None = None  # the latest
    info: msg.EngineInfo | None = None  # once the model is loaded
    stats: EngineStats | None = None  # the latest
    waits: msg.WaitTotals | None = None  # the latest
    routing: asyncio.Future | None = None  # of the RoutingReply that was asked for last
    heard_s: float = field(default_factory=time.monotonic)  # of its latest message, heartbeats apart
    pinged_s: float = 0.0  # when it was asked for a sign of life
    beat: msg.Heartbeat | None = None  # the latest
    beat_s: float = field(default_factory=time.monotonic)  # when it came; before the first: since when it is due
    computes: bool = False  # between the latest two its process used a core
    progress_s: float = field(default_factory=time.monotonic)  # when it was last seen to get on with loading
    left: bool = False  # it said Bye
    lost: bool = False  # it went without a Bye
    pidfd: int = -1  # its process, where it runs on this host; -1: not watched

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid}, host {self.host})"

    def send(self, *messages: msg.ToRank) -> None:
        self.transport.write(b"".join(map(msg.pack, messages)))

    def on_loaded(self, info: msg.EngineInfo) -> None:
        """The heartbeats of the steps begin: those of loading count no more."""
        self.info, self.beat = info, None
        self.beat_s = self.progress_s = time.monotonic()

    def on_loading(self, loading: msg.Loading) -> None:
        if self.loading is None or loading.num_bytes != self.loading.num_bytes:
            self.progress_s = time.monotonic()
        self.loading = loading

    def on_beat(self, beat: msg.Heartbeat) -> None:
        now_s, before = time.monotonic(), self.beat
        if before is not None:
            self.computes = beat.cpu_s - before.cpu_s > _COMPUTES * (now_s - self.beat_s)
        goes_on = before is None or (beat.waits_for, beat.call) != (before.waits_for, before.call)
        if self.info is None and (goes_on or (self.computes and beat.waits_for is None)):
            self.progress_s = now_s
        self.beat, self.beat_s = beat, now_s

    def standing(self, now_s: float) -> Standing:
        """What its latest heartbeat says of this time."""
        heard_s, beat = max(0.0, now_s - self.beat_s), self.beat
        if beat is None:
            return Standing(heard_s)
        if beat.waits_for is not None:
            return Standing(heard_s, beat.waits_for, beat.call, beat.waited_s + heard_s)
        return Standing(heard_s, state="asleep" if beat.asleep else "computes" if self.computes else "steps")

    def process_state(self) -> str:
        """One of PROCESS_STATES where its process stands still, as far as this host's kernel knows it; else ""."""
        return _PROCESS_STATES.get(_state_letter(str(self.pid)), "") if self.host == socket.gethostname() else ""

    @property
    def is_idle(self) -> bool:
        """Whether no thread of its process, which is watched, runs, wants a core, or waits for a disk."""
        try:
            threads = os.listdir(f"/proc/{self.pid}/task")
        except OSError:
            return False
        return self.pidfd >= 0 and not any(_state_letter(f"{self.pid}/task/{thread}") in "RD" for thread in threads)

    def watch_process(self) -> None:
        """From now on kill() and is_stopped() know the process, which must run on this host."""
        with contextlib.suppress(OSError):
            self.pidfd = os.pidfd_open(self.pid)

    @property
    def is_far(self) -> bool:
        """Whether it came over TCP. A fleet's ranks of this host come through a unix socket."""
        return isinstance(self.transport.get_extra_info("peername"), tuple)

    def notice_dead_host(self) -> None:
        """From now on the connection ends where its other host is gone."""
        notice_dead_host(self.transport.get_extra_info("socket"))

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
        """Whether its process, which is watched, stands still: by SIGSTOP, not by a debugger or for lack of a core."""
        return self.pidfd >= 0 and _state_letter(str(self.pid)) == "T"


def _state_letter(process: str) -> str:
    """As proc(5) has it; " " where there is no such process or thread."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return " "
