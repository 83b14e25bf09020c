"""Launcher of one host (`python -m eprt.serve -n N`): starts the frontend and the ranks, and ends with them. No MPI.

The frontend decides: SIGTERM, SIGINT and SIGHUP go to it, as SIGTERM, and it drains; a second signal does not wait for
the drain, a third one kills everything. When the frontend has ended, ranks that are still there are told to, and killed
where they do not. A rank that ends does not end the others: that is the frontend's to say. So ranks can be lost, and
come back: by --restart-lost-ranks, or by `eprt join` (join_door.py). Where a server spans hosts or virtual nodes,
launch.py starts mpirun instead. Knows nothing of what the ranks do.
"""

import contextlib
import os
import select
import signal
import socket
import time
from pathlib import Path

from eprt import env
from eprt.ep.group.host_board import HostBoard
from eprt.models.config_file import ConfigFile
from eprt.serve.certificate import check_certificate
from eprt.serve.device_check import check_device
from eprt.serve.errors import print_line
from eprt.serve.key_sources import read_keys
from eprt.serve.keys import ServerKeys
from eprt.serve.options import SERVING, FrontendConfig, OptionError, RankConfig, ServeOptions, make_diagnose_dir
from eprt.serve.ranks.channel import bind_http, listen
from eprt.serve.ranks.instance_slots import InstanceSlots
from eprt.serve.ranks.join_door import JoinDoor
from eprt.serve.ranks.processes import start_frontend
from eprt.serve.ranks.recovery import CapacityError, check_capacity
from eprt.serve.ranks.slots import RankEnd, RankSlots

LEAVE_S = 60.0  # beyond the drain, until everything is killed
_RANKS_LEAVE_S = 10.0  # for ranks, once the frontend has ended by its own decision
_FRONTEND_NOTICES_S = 15.0  # for the frontend to end, once a rank was lost that it cannot do without
_LONGEST_SLEEP_S = 0.25
_REFUSED = 2  # exit status of a rank that the frontend does not take in
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def launch(options: ServeOptions) -> int:
    """Serves until told to stop; returns the exit status."""
    assert options.num_ranks is not None
    if options.max_lost_ranks:
        _check_capacity(options, options.num_ranks)
    check_device(options)
    keys = read_keys(options)
    check_certificate(options)
    http = bind_http(options.host, options.port)
    make_diagnose_dir(options)
    with http, contextlib.closing(HostBoard.create(options.num_ranks)) as board:
        return _HostLauncher(options, keys, http, board).run()


def _check_capacity(options: ServeOptions, num_ranks: int) -> None:
    """OptionError where the ranks that are left after --max-lost-ranks losses cannot hold all experts."""
    engine = options.engine
    try:
        num_experts = ConfigFile(Path(engine.model_dir) / "config.json").integer("n_routed_experts", 0)
        check_capacity(num_experts, engine.num_redundant_experts, num_ranks, options.max_lost_ranks)
    except (ValueError, CapacityError) as error:
        raise OptionError(f"--max-lost-ranks {options.max_lost_ranks}: {error}") from None


class _HostLauncher:
    """One server's processes. Args: http: the listening socket."""

    def __init__(self, options: ServeOptions, keys: ServerKeys, http: socket.socket, board: HostBoard):
        self._options, self._num_ranks = options, options.num_ranks or 1
        token = os.urandom(16).hex()
        listener, endpoint = listen({socket.gethostname()})
        config = RankConfig(
            options, 0, self._num_ranks, board.fd, endpoint, token, os.getpid(), variables=env.eprt_variables()
        )
        self._slots = InstanceSlots(config) if options.num_instances else RankSlots(config, board)
        self._survives = options.max_lost_ranks > 0 or options.num_instances > 0  # a lost rank may not end the server
        self._door = JoinDoor(self._slots, http.getsockname()[1]) if self._survives else None
        self._notices, notify = os.pipe2(os.O_CLOEXEC)
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._caught_s: list[float] = []  # when signals came
        self._num_forwarded = 0
        self._serves = False  # all ranks have loaded
        self._ends_by_s: float | None = None  # when the frontend should have ended, because of a lost rank
        self._lost: RankEnd | None = None  # that rank
        self._catch_signals()
        fds = http.fileno(), listener.fileno()
        board_fd = board.fd if options.max_lost_ranks else None
        ends = {"notify_fd": notify, "board_fd": board_fd}
        frontend = FrontendConfig(options, self._num_ranks, token, *fds, **ends, keys=keys)
        self._frontend = start_frontend(frontend)
        listener.close()
        os.close(notify)

    def _catch_signals(self) -> None:
        """From now on signals wake the launcher and are counted, until run() ends."""
        self._before = {number: signal.getsignal(number) for number in (*_STOPS, signal.SIGCHLD)}
        for number in _STOPS:
            signal.signal(number, lambda *_: self._caught_s.append(time.monotonic()))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wake_before = signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)

    def run(self) -> int:
        try:
            self._slots.start_all()
            while self._frontend.poll() is None:
                self._sleep()
                self._forward_signals()
                for end in self._slots.reap():
                    self._on_end(end)
                if self._serves and not self._caught_s:
                    self._slots.restart_due()
                    if self._door is not None:
                        self._door.answer()
                self._check_deadlines()
            return self._leave(self._frontend.returncode)
        finally:
            self._kill_all()
            signal.set_wakeup_fd(self._wake_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            for fd in (self._notices, self._wake_reader, self._wake_writer):
                os.close(fd)
            if self._door is not None:
                self._door.close()

    def _sleep(self) -> None:
        """Until something happens."""
        sources = [self._wake_reader, *([] if self._serves else [self._notices])]
        if self._door is not None and self._door.is_open and self._serves and not self._caught_s:
            sources.append(self._door.fileno())
        ready, _, _ = select.select(sources, [], [], _LONGEST_SLEEP_S)
        if self._wake_reader in ready:
            os.read(self._wake_reader, 4096)
        if self._notices in ready and os.read(self._notices, 4096).startswith(SERVING):
            self._serves = True

    def _forward_signals(self) -> None:
        while self._num_forwarded < len(self._caught_s):
            self._num_forwarded += 1
            if self._num_forwarded > 2:
                self._kill_all()
            else:
                self._frontend.send_signal(signal.SIGTERM)

    def _on_end(self, end: RankEnd) -> None:
        if self._caught_s:
            return
        if self._serves and self._survives:
            line = f"eprt: {end}"
            if end.status not in (0, _REFUSED) and self._options.restart_lost_ranks:
                line += f"; it is started again in {self._slots.plan_restart(end):g} s"
            print_line(line)
        elif self._ends_by_s is None:
            self._lost, self._ends_by_s = end, time.monotonic() + _FRONTEND_NOTICES_S

    def _check_deadlines(self) -> None:
        now_s = time.monotonic()
        if self._ends_by_s is not None and now_s > self._ends_by_s and not self._caught_s:
            # The frontend has never heard of that rank.
            print_line(f"eprt: {self._lost}; stopping")
            self._kill_all()
        allowed_s = self._options.drain_timeout_s + LEAVE_S
        if self._caught_s and now_s > self._caught_s[0] + allowed_s:
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
        # Those that load have nothing to finish and leave at this; to those that are leaving it says nothing new.
        self._slots.send_signal(signal.SIGUSR1)
        deadline_s = time.monotonic() + (_RANKS_LEAVE_S if status == 0 else 1.0)
        ends: list[RankEnd] = []
        while self._slots.num_running and time.monotonic() < deadline_s:
            ends += self._slots.reap()
            with contextlib.suppress(InterruptedError):
                select.select([self._wake_reader], [], [], 0.05)
        if status == 0 or (self._caught_s and status == -signal.SIGTERM):  # it may die of the signal while it starts
            failed = [end for end in ends if end.status > 0 and end.status != 128 + signal.SIGUSR1]
            return 1 if failed and self._serves else 0
        if status < 0 and not self._num_forwarded > 2 and self._lost is None:
            pid = self._frontend.pid
            print_line(f"eprt: the HTTP frontend (pid {pid}) was lost: killed by signal {-status}; stopping")
        return status if status > 0 else 1
