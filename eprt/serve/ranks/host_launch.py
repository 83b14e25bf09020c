"""Launcher of one host (`python -m eprt.serve -n N`): starts the frontend and the ranks, and ends with them. No MPI.

The frontend decides: SIGTERM, SIGINT and SIGHUP go to it, as SIGTERM, and it drains; a second signal does not wait for
the drain, a third one kills everything. When the frontend has ended, ranks that are still there are told to, and killed
where they do not. A rank that ends does not end the others: that is the frontend's to say. So ranks can be lost, and
come back: by --restart-lost-ranks, or by `eprt join` (join_door.py). Where a server spans hosts, this is the launcher
of host 0, and hosts/ tells it of the others; under a scheduler's mpirun launch.py starts that instead. Knows nothing of
what the ranks do.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eprt import env
from eprt.ep.group.host_board import HostBoard
from eprt.models.config_file import ConfigFile
from eprt.serve.certificate import check_certificate, tell_refused_certificate
from eprt.serve.device_check import check_device, visible_gpus
from eprt.serve.errors import print_line
from eprt.serve.fingerprint import begin_fingerprint
from eprt.serve.key_sources import read_keys, tell_open_files
from eprt.serve.keys import ServerKeys
from eprt.serve.options import (
    LOST,
    REFUSED,
    SERVING,
    FrontendConfig,
    OptionError,
    RankConfig,
    ServeOptions,
    WireJoin,
    make_diagnose_dir,
)
from eprt.serve.ranks.caught_signals import CaughtSignals
from eprt.serve.ranks.channel import bind_http, listen
from eprt.serve.ranks.instance_slots import InstanceSlots
from eprt.serve.ranks.join_door import JoinDoor
from eprt.serve.ranks.other_hosts import HostLoss, HostStop, OtherHosts
from eprt.serve.ranks.processes import start_frontend
from eprt.serve.ranks.recovery import CapacityError, check_capacity
from eprt.serve.ranks.slots import RankEnd, RankSlots

LEAVE_S = 60.0  # beyond the drain, until everything is killed
RANKS_LEAVE_S = 10.0  # for ranks, once the frontend has ended by its own decision
_FRONTEND_NOTICES_S = 15.0  # for the frontend to end, once a rank was lost that it cannot do without
LONGEST_SLEEP_S = 0.25


@dataclass(frozen=True)
class RunPlace:
    """Where a run's processes come together."""

    listener: socket.socket  # the frontend's, for ranks; closed once it has started
    endpoint: str  # of the listener
    token: str  # see FrontendConfig
    board: HostBoard | None  # of ranks that share the host's memory
    wire: WireJoin | None = None  # of ranks that do not
    meeting: socket.socket | None = None  # of wire.listener_fd; closed once rank 0 has started


def launch(options: ServeOptions) -> int:
    """Serves until told to stop; returns the exit status."""
    assert options.num_ranks is not None
    if options.max_lost_ranks:
        _check_capacity(options, options.num_ranks)
    with prepared_http(options) as (keys, http), contextlib.closing(HostBoard.create(options.num_ranks)) as board:
        place = RunPlace(*listen({socket.gethostname()}), os.urandom(16).hex(), board)
        return HostLauncher(options, keys, http, place, OtherHosts()).run()


@contextlib.contextmanager
def prepared_http(options: ServeOptions) -> Iterator[tuple[ServerKeys, socket.socket]]:
    """The keys and the listening HTTP socket; OptionError for what is wrong with files, devices and addresses."""
    check_device(options)
    keys = read_keys(options)
    tell_open_files(options)
    check_certificate(options)
    tell_refused_certificate(options)
    http = bind_http(options.host, options.port)
    make_diagnose_dir(options)
    with http:
        yield keys, http


def _check_capacity(options: ServeOptions, num_ranks: int) -> None:
    """OptionError where the ranks that are left after --max-lost-ranks losses cannot hold all experts."""
    engine = options.engine
    try:
        num_experts = ConfigFile(Path(engine.model_dir) / "config.json").integer("n_routed_experts", 0)
        check_capacity(num_experts, engine.num_redundant_experts, num_ranks, options.max_lost_ranks)
    except (ValueError, CapacityError) as error:
        raise OptionError(f"--max-lost-ranks {options.max_lost_ranks}: {error}") from None


class HostLauncher:
    """One server's processes on the host with the frontend.

    Args:
        http: the listening socket.
        others: the hosts that have ranks of this server too.
    """

    def __init__(
        self, options: ServeOptions, keys: ServerKeys, http: socket.socket, place: RunPlace, others: OtherHosts
    ):
        self._options, self._place, self._others = options, place, others
        board_fd = None if place.board is None else place.board.fd
        config = RankConfig(
            options,
            0,
            options.total_ranks,
            board_fd,
            place.endpoint,
            place.token,
            os.getpid(),
            variables=env.eprt_variables(),
            wire=place.wire,
        )
        here = range(options.num_ranks or 1)
        self._survives = options.max_lost_ranks > 0 or options.num_instances > 0  # a lost rank may not end the server
        print_of = begin_fingerprint(options.engine.model_dir).result if self._survives else str
        gpus = visible_gpus() if options.engine.device == "cuda" else ()
        instances = InstanceSlots(config, gpus) if options.num_instances else None
        self._slots = instances or RankSlots(config, place.board, here, print_of)
        self._door = JoinDoor(self._slots, http.getsockname()[1], print_of) if self._survives else None
        self._notices, notify = os.pipe2(os.O_CLOEXEC)
        self._unread = b""  # the beginning of a notice
        self._num_forwarded = 0
        self._serves = False  # all ranks have loaded
        self._reason = ""  # the frontend's, where it cannot go on
        self._ends_by_s: float | None = None  # when the frontend should have ended, because of a loss
        self._lost: RankEnd | HostLoss | None = None  # what was lost
        self._signals = CaughtSignals()
        fds = http.fileno(), place.listener.fileno()
        ends = {"notify_fd": notify, "board_fd": board_fd if options.max_lost_ranks else None}
        frontend = FrontendConfig(options, options.total_ranks, place.token, *fds, **ends, keys=keys)
        self._frontend = start_frontend(frontend)
        place.listener.close()
        os.close(notify)

    def run(self) -> int:
        try:
            self._slots.start_all()
            if self._place.meeting is not None:
                self._place.meeting.close()
            while self._frontend.poll() is None:
                self._sleep()
                self._forward_signals()
                for end in self._slots.reap():
                    self._on_end(end)
                for event in self._others.take_events():
                    self._on_other_host(event)
                if self._serves and not self._signals.times_s:
                    self._slots.restart_due()
                    if self._door is not None:
                        self._door.answer()
                self._check_deadlines()
            return self._leave(self._frontend.returncode)
        finally:
            self._kill_all()
            self._others.tell_ended(1, "")  # unless they were told before
            self._signals.close()
            os.close(self._notices)
            if self._door is not None:
                self._door.close()

    def _sleep(self) -> None:
        """Until something happens."""
        sources = [*self._others.filenos(), *([] if self._serves else [self._notices])]
        if self._door is not None and self._door.is_open and self._serves and not self._signals.times_s:
            sources.append(self._door.fileno())
        if self._notices in self._signals.wait(sources, LONGEST_SLEEP_S):
            self._read_notices()

    def _read_notices(self) -> None:
        *notices, self._unread = (self._unread + os.read(self._notices, 4096)).split(b"\n")
        for notice in notices:
            if notice + b"\n" == SERVING:
                self._serves = True
                self._others.tell_serving()
            elif notice.startswith(LOST):
                self._reason = notice.removeprefix(LOST).decode(errors="replace")

    def _forward_signals(self) -> None:
        while self._num_forwarded < len(self._signals.times_s):
            self._num_forwarded += 1
            if self._num_forwarded > 2:
                self._kill_all()
            else:
                self._frontend.send_signal(signal.SIGTERM)

    def _on_end(self, end: RankEnd) -> None:
        if self._signals.times_s:
            return
        if self._serves and self._survives:
            line = f"eprt: {end}"
            if end.status not in (0, REFUSED) and self._options.restart_lost_ranks:
                line += f"; it is started again in {self._slots.plan_restart(end):g} s"
            print_line(line)
        else:
            self._expect_end(end, _FRONTEND_NOTICES_S)

    def _on_other_host(self, event: HostStop | HostLoss | RankEnd) -> None:
        match event:
            case HostStop():
                self._signals.times_s.append(time.monotonic())
            case RankEnd():
                self._on_end(event)
            case HostLoss():
                # Where its ranks live on, they have the server drain; where they do not, the frontend notices.
                drain_s = self._options.drain_timeout_s + LEAVE_S
                self._expect_end(event, drain_s if self._serves else _FRONTEND_NOTICES_S)

    def _expect_end(self, lost: RankEnd | HostLoss, within_s: float) -> None:
        if self._ends_by_s is None:
            self._lost, self._ends_by_s = lost, time.monotonic() + within_s

    def _check_deadlines(self) -> None:
        now_s, caught_s = time.monotonic(), self._signals.times_s
        if self._ends_by_s is not None and now_s > self._ends_by_s and not caught_s:
            # The frontend has never heard of that rank.
            self._reason = f"{self._lost}; stopping"
            print_line(f"eprt: {self._reason}")
            self._others.tell_ended(1, self._reason)
            self._kill_all()
        allowed_s = self._options.drain_timeout_s + LEAVE_S
        if caught_s and now_s > caught_s[0] + allowed_s:
            print_line(f"eprt: not ended {allowed_s:g} s after it was told to stop: killing the ranks and the frontend")
            self._kill_all()

    def _kill_all(self) -> None:
        self._slots.send_signal(signal.SIGKILL)
        if self._frontend.poll() is None:
            self._frontend.kill()
            self._frontend.wait()
        while self._slots.num_running:
            self._slots.reap()
            time.sleep(0.005)

    def _leave(self, status: int) -> int:
        """Once the frontend has ended: the ranks leave too. Returns the exit status of the server."""
        caught = bool(self._signals.times_s)
        drained = status == 0 or (caught and status == -signal.SIGTERM)  # it may die of the signal while it starts
        if not drained and status < 0 and not self._num_forwarded > 2 and self._lost is None:
            pid = self._frontend.pid
            self._reason = f"the HTTP frontend (pid {pid}) was lost: killed by signal {-status}; stopping"
            print_line(f"eprt: {self._reason}")
        elif drained and isinstance(self._lost, HostLoss) and not caught:
            drained, status, self._reason = False, 1, f"{self._lost}; the ranks have drained and stopped"
            print_line(f"eprt: {self._reason}")
        elif not drained:
            self._read_notices()
        self._others.tell_ended(0 if drained else 1, self._reason)
        # Those that load have nothing to finish and leave at this; to those that are leaving it says nothing new.
        self._slots.send_signal(signal.SIGUSR1)
        ends = wait_ended(self._slots, self._signals, RANKS_LEAVE_S if status == 0 else 1.0)
        if drained:
            failed = [end for end in ends if end.status > 0 and end.status != 128 + signal.SIGUSR1]
            return 1 if failed and self._serves else 0
        return status if status > 0 else 1


def wait_ended(slots: RankSlots | InstanceSlots, signals: CaughtSignals, timeout_s: float) -> list[RankEnd]:
    """The ends of the ranks that have ended by then."""
    deadline_s, ends = time.monotonic() + timeout_s, []
    while slots.num_running and time.monotonic() < deadline_s:
        ends += slots.reap()
        signals.wait([], 0.05)
    return ends
