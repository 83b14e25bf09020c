"""JoinDoor: where `eprt join` of the same host and user asks the launcher for the place of a rank that is gone.

An abstract unix socket, named by the HTTP port; the kernel tells whose process asks. One line of JSON each way:

    joiner    {"rank": 2 or null, "version": "...", "model": fingerprint or null}
    launcher  {"error": "..."} or {"config": RankConfig}, with the board's descriptor
    joiner    {"pid": of the rank's process}

A whole instance ("role", "num_ranks") brings a board of its own, and gets a name. With "by_launcher" the launcher
starts its ranks itself, and answers {"started": name, "pids": [...]}: so asks the frontend.

Knows nothing of the frontend, which must accept the rank too.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from eprt.serve.errors import print_line
from eprt.serve.fingerprint import why_not_alike
from eprt.serve.options import RankConfig
from eprt.serve.rank_fit import why_no_teams
from eprt.serve.ranks.instance_slots import InstanceSlots
from eprt.serve.ranks.slots import AdoptedProcess, RankSlots

_ANSWER_S = 2.0  # for each side's line
_MAX_LINE_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of the process at the other end


class JoinRequest(msgspec.Struct, frozen=True):
    rank: int | None  # None: any that is gone
    version: str  # of eprt
    model: str | None  # its fingerprint; None: the server's own directory
    role: str | None = None  # of a whole instance (--role), of num_ranks ranks; None: a rank
    num_ranks: int = 1
    by_launcher: bool = False  # of a whole instance: the launcher starts it
    gpus: list[str] = []  # UUIDs of those that the joiner sees


class JoinAnswer(msgspec.Struct, frozen=True):
    error: str | None = None
    config: RankConfig | None = None
    started: str | None = None  # name of an instance that the launcher has started
    pids: list[int] = []  # of its ranks


class JoinedProcess(msgspec.Struct, frozen=True):
    pid: int  # of the rank, or of the process that started an instance


_Line = TypeVar("_Line", JoinRequest, JoinAnswer, JoinedProcess)


def door_name(port: int) -> str:
    """The abstract name of the door of the server at this port. A network namespace has one of both."""
    return f"\0eprt-join-{port}"


def peer_uid(sock: socket.socket) -> int:
    return _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]


def send_line(sock: socket.socket, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
    sock.settimeout(_ANSWER_S)
    data = msgspec.json.encode(message) + b"\n"
    if fds:
        data = data[socket.send_fds(sock, [data], fds) :]
    if data:  # nothing, sent to somebody who has answered and gone, fails as well
        sock.sendall(data)


def receive_line(sock: socket.socket, kind: type[_Line], max_fds: int = 0) -> tuple[_Line, list[int]]:
    """A message of this kind and the descriptors that came with it. ValueError or OSError where none comes."""
    deadline_s = time.monotonic() + _ANSWER_S  # of the line: one byte now and then would hold the launcher
    line, fds = b"", []
    while not line.endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise ValueError(f"the other side sent no whole line within {_ANSWER_S:g} s")
        sock.settimeout(left_s)
        data, more, _, _ = socket.recv_fds(sock, _MAX_LINE_BYTES, max_fds)
        fds += more
        line += data
        if not data or len(line) > _MAX_LINE_BYTES:
            raise ValueError("the other side sent no whole line")
    try:
        return msgspec.json.decode(line, type=kind), fds
    except RecursionError:
        raise ValueError("the other side's line is nested too deeply") from None


class JoinDoor:
    """The launcher's side.

    Args:
        slots: to which processes are added.
        port: of the HTTP socket.
        fingerprint: of the model that the ranks have loaded, "" where it is not known; asked for when a process comes.
    """

    def __init__(self, slots: RankSlots | InstanceSlots, port: int, fingerprint: Callable[[], str]):
        self._slots, self._fingerprint = slots, fingerprint
        self.is_open = False  # whether anybody can come
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        try:
            self._sock.bind(door_name(port))
        except OSError as error:
            print_line(f"eprt: `eprt join` cannot reach this server: {error.strerror} (another one has port {port})")
        else:
            self._sock.listen(8)
            self.is_open = True

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def answer(self) -> None:
        """Answers one process that asks; returns at once where none does."""
        try:
            sock, _ = self._sock.accept()
        except OSError:
            return
        with sock, contextlib.suppress(OSError, ValueError):  # it went away, or is no joiner
            if peer_uid(sock) not in (os.geteuid(), 0):
                return
            request, _ = receive_line(sock, JoinRequest)
            if isinstance(self._slots, InstanceSlots):
                self._answer_instance(sock, self._slots, request)
            else:
                self._answer_rank(sock, self._slots, request)

    def _answer_rank(self, sock: socket.socket, slots: RankSlots, request: JoinRequest) -> None:
        rank, error = self._choose_slot(slots, request)
        if error is not None:
            send_line(sock, JoinAnswer(error=error))
            return
        config = slots.config_of(rank, joins=True)
        assert config.board_fd is not None, "a rank can only join others that share its host's memory"
        send_line(sock, JoinAnswer(config=config), (config.board_fd,))
        joined, _ = receive_line(sock, JoinedProcess)
        slots.add_process(rank, AdoptedProcess(joined.pid))
        print_line(f"eprt: rank {rank} (pid {joined.pid}) joins")

    def _answer_instance(self, sock: socket.socket, slots: InstanceSlots, request: JoinRequest) -> None:
        error = self._difference(request, slots.config)
        if error is None and request.role is None:
            error = "this server has instances: give --role prefill or --role decode"
        error = error or why_no_teams(slots.config.options.engine, request.num_ranks) or None
        error = error or _why_other_gpus(slots, request)
        if error is not None or request.role is None:
            send_line(sock, JoinAnswer(error=error))
            return
        try:
            if request.by_launcher:
                name, pids = slots.start_instance(request.role, request.num_ranks)
                send_line(sock, JoinAnswer(started=name, pids=pids))
                return
            config = slots.config_of_joiner(request.role, request.num_ranks)
        except ValueError as why:  # no GPUs are left
            send_line(sock, JoinAnswer(error=str(why)))
            return
        send_line(sock, JoinAnswer(config=config))
        joined, _ = receive_line(sock, JoinedProcess)
        slots.add_joiner(config, AdoptedProcess(joined.pid))
        assert config.instance is not None, "it has just been named"
        print_line(f"eprt: instance {config.instance.name} (pid {joined.pid}, {request.num_ranks} ranks) joins")

    def _choose_slot(self, slots: RankSlots, request: JoinRequest) -> tuple[int, str | None]:
        """The slot, or why there is none."""
        config, taken = slots.config_of(0, joins=True), slots.pid_of_rank
        gone = [rank for rank in range(config.num_ranks) if rank not in taken]
        if error := self._difference(request, config):
            return -1, error
        if request.role is not None:
            return -1, "this server is one group of ranks: --role is for servers with --decode"
        if request.rank is None:
            return (gone[0], None) if gone else (-1, f"all {config.num_ranks} ranks run: there is no place to join")
        if not 0 <= request.rank < config.num_ranks:
            return -1, f"--rank {request.rank}: the server has the ranks 0..{config.num_ranks - 1}"
        if request.rank in taken:
            return -1, f"--rank {request.rank}: that rank runs (pid {taken[request.rank]}); free: {gone or 'none'}"
        return request.rank, None

    def _difference(self, request: JoinRequest, config: RankConfig) -> str | None:
        """Why its ranks cannot compute with the server's."""
        model_dir = config.options.engine.model_dir
        return why_not_alike(request.version, request.model, model_dir, self._fingerprint)


def _why_other_gpus(slots: InstanceSlots, request: JoinRequest) -> str | None:
    """Ranks can read the memory of GPUs that they see, and no other."""
    unseen = [gpu for gpu in slots.gpus if gpu not in request.gpus]
    if request.by_launcher or not unseen:
        return None
    return f"this shell does not see the server's GPU {unseen[0]}: give it the server's CUDA_VISIBLE_DEVICES"
