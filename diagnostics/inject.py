"""Fault injection in a running job: to try the diagnosis, and to see what a fault does. Knows no torch, no runtime.

    python -m eprt.serve -n 8 --model DIR --inject slow-rank:3:2x
    with Injector(["late-compute:3:2x@10-40"], rank, num_ranks) as injector:     # every rank of your own program
        backend = injector.wrap(backend)

A fault is written KIND:RANK[:PEER]:SIZE, and @FROM-TO adds seconds after the start (default: from 0 to the end).

    slow-rank:3:2x        rank 3 is paused half of the time (SIGSTOP, SIGCONT), 50 ms at a time
    slow-link:2:5:3ms     what rank 5 sends reaches rank 2 3 ms later
    late-compute:3:2x     rank 3's experts take twice as long; 2ms: 2 ms longer
    skewed-tokens:3:4x    as many tokens go to rank 3's experts as to four ranks (answers change)
    bursty:3:3x           late-compute for 2 s of every 6 s
    stop:3:5s             rank 3 is stopped for 5 s, once; by default 5 s after the start

Nothing is simulated: a fault costs real time, and the runtime measures it like any other. A backend is any object with
the EP calls.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

KINDS = ("slow-rank", "slow-link", "late-compute", "skewed-tokens", "bursty", "stop")
_PAUSING = ("slow-rank", "stop")
_OF_ALL_RANKS = ("skewed-tokens",)  # every rank sends the named rank more of its tokens
_PAUSE_S = 0.05  # longer than a call of many ranks on few cores, in which a shorter one would be lost
_BURST_S, _BURST_PERIOD_S = 2.0, 6.0
_STOP_AFTER_S = 5.0
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(x|us|ms|s)")
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Injection:
    """One fault. Its size is a factor or a time."""

    kind: str
    rank: int  # who is hit
    peer: int | None = None  # slow-link only: whose data come late
    factor: float | None = None
    seconds: float | None = None
    start_s: float = 0.0  # after the start, when it begins
    end_s: float = float("inf")
    text: str = field(default="", compare=False)  # as it was written

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def parse(text: str) -> "Injection":
        """ValueError saying what is wrong with the text and how it is written."""
        what, at, when = text.partition("@")
        kind, *words = what.split(":")
        if kind not in KINDS:
            raise ValueError(f"{text!r}: no fault {kind!r}; there are {', '.join(KINDS)}")
        num_ranks = 2 if kind == "slow-link" else 1
        size = _SIZE.fullmatch(words[-1]) if len(words) == num_ranks + 1 else None
        if size is None or not all(word.isdecimal() for word in words[:-1]):
            form = "RANK:PEER:SIZE, as in slow-link:2:5:3ms" if kind == "slow-link" else f"RANK:SIZE, as in {kind}:3:2x"
            raise ValueError(f"{text!r}: write {kind}:{form}")
        factor = float(size[1]) if size[2] == "x" else None
        seconds = None if factor is not None else float(size[1]) * _UNITS_S[size[2]]
        start_s, end_s = _seconds_of(text, when) if at else (_STOP_AFTER_S if kind == "stop" else 0.0, float("inf"))
        takes = {"slow-link": "s", "stop": "s", "late-compute": "xs", "bursty": "xs"}.get(kind, "x")
        if (factor is None and "s" not in takes) or (seconds is None and "x" not in takes):
            raise ValueError(f"{text!r}: {kind} takes a {'factor (2x)' if takes == 'x' else 'time (3ms)'}")
        if (factor is not None and factor <= 1) or (seconds is not None and seconds <= 0):
            raise ValueError(f"{text!r}: a factor must be above 1x, a time above 0")
        rank, peer = int(words[0]), int(words[1]) if kind == "slow-link" else None
        if peer == rank:
            raise ValueError(f"{text!r}: a link has two ends; rank {rank} is both")
        return Injection(kind, rank, peer, factor, seconds, start_s, end_s, text)

    def check_ranks(self, num_ranks: int) -> None:
        """ValueError when a rank it names does not exist."""
        for rank in (self.rank, self.peer):
            if rank is not None and rank >= num_ranks:
                raise ValueError(f"fault {self.kind} names rank {rank}; there are ranks 0..{num_ranks - 1}")

    def is_on(self, since_start_s: float) -> bool:
        on = self.start_s <= since_start_s < self.end_s
        return on and (self.kind != "bursty" or (since_start_s - self.start_s) % _BURST_PERIOD_S < _BURST_S)


def _seconds_of(text: str, when: str) -> tuple[float, float]:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)?", when)
    if match is None or (match[2] and float(match[2]) <= float(match[1])):
        raise ValueError(f"{text!r}: after @ write FROM-TO in seconds, as in @10-40 or @10-")
    return float(match[1]), float(match[2]) if match[2] else float("inf")


class Injector:
    """The faults of one rank. Those of other ranks are ignored, so all ranks may be given the same list."""

    def __init__(self, faults: Sequence[str | Injection], rank: int, num_ranks: int):
        parsed = [Injection.parse(fault) if isinstance(fault, str) else fault for fault in faults]
        for fault in parsed:
            fault.check_ranks(num_ranks)
        self.faults = [fault for fault in parsed if fault.rank == rank or fault.kind in _OF_ALL_RANKS]
        self.num_ranks = num_ranks
        self._start_s = time.monotonic()
        self._pausers = [_start_pauser(fault) for fault in self.faults if fault.kind in _PAUSING]

    def since_start_s(self) -> float:
        return time.monotonic() - self._start_s

    def wrap(self, backend: Any) -> Any:
        """The backend with this rank's faults; the backend itself where none concern it."""
        faults = [fault for fault in self.faults if fault.kind not in _PAUSING]
        for fault in faults:
            if fault.kind == "slow-link":
                backend.delay_link(fault.peer, 0.0)  # a backend whose links cannot be delayed refuses now
        return FaultyBackend(backend, faults, self) if faults else backend

    def close(self) -> None:
        """Ends the pausing. Wrapped backends keep their faults."""
        for pauser in self._pausers:
            pauser.terminate()
            pauser.wait()
        self._pausers.clear()

    def __enter__(self) -> "Injector":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


class FaultyBackend:
    """A backend that loses time between its EP calls. Everything else is the wrapped backend's own."""

    def __init__(self, backend: Any, faults: Sequence[Injection], injector: Injector):
        self._backend, self._injector = backend, injector
        self._links = [fault for fault in faults if fault.kind == "slow-link"]
        self._computes = [fault for fault in faults if fault.kind in ("late-compute", "bursty")]
        self._skews = [fault for fault in faults if fault.kind == "skewed-tokens"]
        self._delayed: set[Injection] = set()
        self._received_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def is_alone(self) -> bool:
        return False  # faults happen in the calls

    def dispatch_send(self, x_TH: Any, slot_idx_TK: Any, *arguments: Any, **options: Any) -> Any:
        return self._backend.dispatch_send(x_TH, self._before_dispatch(slot_idx_TK), *arguments, **options)

    def dispatch(self, x_TH: Any, slot_idx_TK: Any, *arguments: Any) -> Any:
        handle, received = self._backend.dispatch(x_TH, self._before_dispatch(slot_idx_TK), *arguments)
        self._received_s = time.monotonic()
        return handle, received

    def _before_dispatch(self, slot_idx_TK: Any) -> Any:
        now_s = self._injector.since_start_s()
        for fault in self._links:
            if fault.is_on(now_s) != (fault in self._delayed):
                self._delayed ^= {fault}
                self._backend.delay_link(fault.peer, fault.seconds if fault in self._delayed else 0.0)
        for fault in self._skews:
            if fault.is_on(now_s):
                slot_idx_TK = self._skewed(slot_idx_TK, fault)
        return slot_idx_TK

    def dispatch_recv(self, handle: Any) -> Any:
        received = self._backend.dispatch_recv(handle)
        self._received_s = time.monotonic()
        return received

    def combine_send(self, *arguments: Any, **options: Any) -> Any:
        self._before_combine()
        return self._backend.combine_send(*arguments, **options)

    def combine(self, *arguments: Any) -> Any:
        self._before_combine()
        return self._backend.combine(*arguments)

    def _before_combine(self) -> None:
        took_s, now_s = time.monotonic() - self._received_s, self._injector.since_start_s()
        for fault in self._computes:
            if fault.is_on(now_s):
                time.sleep(fault.seconds if fault.seconds is not None else ((fault.factor or 1) - 1) * took_s)

    def _skewed(self, slot_idx_TK: Any, fault: Injection) -> Any:
        """Sends the first tokens to the rank's slots: as many as give it the share of `factor` ranks."""
        num_ranks = self._injector.num_ranks
        slots_per_rank = self._backend.config.num_slots // num_ranks
        share = min(1.0, ((fault.factor or 1) - 1) / max(1, num_ranks - 1))
        num_tokens = round(share * slot_idx_TK.shape[0])
        width = min(slot_idx_TK.shape[1], slots_per_rank)  # a token takes each slot once
        skewed_TK = slot_idx_TK.clone()
        first = skewed_TK[:num_tokens, :width]
        mine = skewed_TK.new_tensor([fault.rank * slots_per_rank + k for k in range(width)]).expand_as(first)
        skewed_TK[:num_tokens, :width] = mine.where(first >= 0, first)
        rest = skewed_TK[:num_tokens, width:]
        taken = (rest >= fault.rank * slots_per_rank) & (rest < (fault.rank + 1) * slots_per_rank)
        skewed_TK[:num_tokens, width:] = rest.masked_fill(taken, -1)
        return skewed_TK


def _start_pauser(fault: Injection) -> subprocess.Popen:
    """A paused process cannot wake itself, so a child does it, which ends with its parent."""
    if fault.seconds is not None:  # "stop"
        paused_s, running_s, end_s = fault.seconds, 3600.0, fault.start_s + 2 * fault.seconds
    else:
        paused_s, running_s, end_s = _PAUSE_S, _PAUSE_S / ((fault.factor or 1.0) - 1), fault.end_s
    numbers = (os.getpid(), paused_s, running_s, fault.start_s, end_s)
    return subprocess.Popen([sys.executable, "-m", "eprt.diagnostics.inject", *map(str, numbers)])


def pause(pid: int, paused_s: float, running_s: float, start_s: float, end_s: float) -> None:
    """Stops and continues process pid, the parent, in turn, from start_s to end_s seconds from now."""
    begin_s = time.monotonic()

    def sleep(seconds: float) -> bool:
        """False when the parent has ended or the time is up."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            if os.getppid() != pid or time.monotonic() - begin_s > end_s:
                return False
            time.sleep(min(left_s, 0.5))
        return True

    going = sleep(start_s)
    while going:
        try:
            os.kill(pid, signal.SIGSTOP)
            going = sleep(paused_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        going = going and sleep(running_s)


def _main(words: Sequence[str]) -> None:
    def leave(number: int, frame: Any) -> None:
        raise SystemExit(0)  # so that a paused process is continued

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, leave)
    with contextlib.suppress(ProcessLookupError):
        pause(int(words[0]), *map(float, words[1:]))


if __name__ == "__main__":
    _main(sys.argv[1:])
