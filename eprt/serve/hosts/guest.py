"""GuestLauncher: the launcher of a host without the frontend: it starts this host's ranks, and ends with the server.

Host 0 decides: signals that come here go there, and the server drains; a third one kills this host's ranks. Host 0 says
how the server has ended, and why. Where host 0 is gone, its ranks have the server drain, and those of this host leave.
"""

import signal
import time

from eprt.serve.errors import print_line
from eprt.serve.hosts.link import HostLink
from eprt.serve.hosts.messages import Ended, RankEnded, Serving, StopAsked
from eprt.serve.options import RankConfig
from eprt.serve.ranks.caught_signals import CaughtSignals
from eprt.serve.ranks.host_launch import LEAVE_S, LONGEST_SLEEP_S, RANKS_LEAVE_S, wait_ended
from eprt.serve.ranks.slots import RankEnd, RankSlots

_HOST_0_TELLS_S = 20.0  # from the end of the last rank here until host 0 says why: it waits for the frontend


class GuestLauncher:
    """One host's ranks.

    Args:
        config: of each rank; only rank differs.
        link: to host 0.
    """

    def __init__(self, config: RankConfig, link: HostLink):
        options = config.options
        self._options, self._link = options, link
        first, num = options.node_rank * (options.num_ranks or 1), options.num_ranks or 1
        self._slots = RankSlots(config, None, range(first, first + num))
        self._num_forwarded = 0
        self._ended: Ended | None = None  # what host 0 has said
        self._lost: RankEnd | None = None  # the first rank that did not end by itself
        self._ends_by_s: float | None = None  # when this launcher ends, whatever host 0 says
        self._signals = CaughtSignals()

    def run(self) -> int:
        try:
            self._slots.start_all()
            while self._ended is None:
                self._signals.wait([] if self._link.is_lost else [self._link.fileno()], LONGEST_SLEEP_S)
                for message in self._link.receive(0):
                    self._on_message(message)
                self._forward_signals()
                for end in self._slots.reap():
                    self._on_end(end)
                if self._ended is None and (status := self._check_end()) is not None:
                    return status
            return self._leave(self._ended)
        finally:
            self._slots.send_signal(signal.SIGKILL)
            wait_ended(self._slots, self._signals, LEAVE_S)
            self._signals.close()
            self._link.close()

    def _on_message(self, message: object) -> None:
        match message:
            case Serving():
                num = self._options.num_ranks
                where = f"host {self._options.node_rank} of {self._options.nnodes}, {num} rank{'' if num == 1 else 's'}"
                print_line(f"eprt: {where}: the server is ready; its HTTP port is on host 0")
            case Ended():
                self._ended = message

    def _forward_signals(self) -> None:
        while self._num_forwarded < len(self._signals.times_s):
            self._num_forwarded += 1
            self._link.send(StopAsked())
            if self._num_forwarded > 2 or self._link.is_lost:
                self._slots.send_signal(signal.SIGKILL)

    def _on_end(self, end: RankEnd) -> None:
        self._link.send(RankEnded(end.rank, end.pid, end.status))
        if end.status != 0 and self._lost is None:
            self._lost = end

    def _check_end(self) -> int | None:
        """The exit status where nothing is to be expected from host 0 any more."""
        now_s = time.monotonic()
        if self._link.is_lost:
            if self._ends_by_s is None:
                self._ends_by_s = now_s + self._options.drain_timeout_s + LEAVE_S
                where = self._options.dist_init_addr
                print_line(f"eprt: host 0 ({where}) was lost: its launcher is gone; the ranks of this host stop")
            if not self._slots.num_running or now_s > self._ends_by_s:
                return 1
        elif self._slots.num_running:
            self._ends_by_s = None
        elif self._ends_by_s is None:
            self._ends_by_s = now_s + _HOST_0_TELLS_S + (self._options.drain_timeout_s if self._lost is None else 0.0)
        elif now_s > self._ends_by_s:
            print_line(f"eprt: {self._lost or 'all ranks of this host have left'}; host 0 does not end the server")
            return 1
        caught_s, allowed_s = self._signals.times_s, self._options.drain_timeout_s + LEAVE_S
        if caught_s and now_s > caught_s[0] + allowed_s:
            print_line(f"eprt: not ended {allowed_s:g} s after it was told to stop: killing the ranks of this host")
            return 1
        return None

    def _leave(self, ended: Ended) -> int:
        """Host 0 has ended the server. Returns the exit status."""
        if ended.status:
            print_line(f"eprt: {ended.reason or 'the server has ended; host 0 says why'}")
        self._slots.send_signal(signal.SIGUSR1)
        wait_ended(self._slots, self._signals, 1.0 if ended.status else RANKS_LEAVE_S)
        return ended.status
