"""InstanceStarter: has new instances started, by this server's launcher or by a command of the operator's.

The launcher answers at the door where `eprt join` asks it, too (ranks/join_door.py). A command is split as a shell
would, without a shell, and its words may have {role}, {ranks} and {url}; what it starts joins by itself. Knows nothing
of when to start one.
"""

import asyncio
import contextlib
import logging
import os
import shlex
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass, field

import eprt
from eprt.serve.errors import ApiError
from eprt.serve.options import ServeOptions
from eprt.serve.rank_fit import why_no_teams
from eprt.serve.ranks.join_door import JoinAnswer, JoinRequest, door_name, receive_line, send_line
from eprt.serve.start_command import command_words

_log = logging.getLogger(__name__)

_COMMAND_S = 5.0  # how long a request waits for the command's status
_PATIENCE_S = 600.0  # until an instance that has not said Hello is given up


@dataclass(slots=True)
class PendingStart:
    """An instance that was asked for and has not said Hello yet."""

    role: str
    num_ranks: int
    name: str = ""  # "": the command does not tell
    pids: tuple[int, ...] = ()  # of its ranks, where the launcher started them
    process: asyncio.subprocess.Process | None = None  # the command
    since_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return self.name or f"the {self.role} instance of --start-instance-command"

    def why_failed(self) -> str:
        """ "": it may still come."""
        if self.pids and not any(map(_runs, self.pids)):
            return "its processes have ended; the server's output says why"
        if self.process is not None and self.process.returncode:
            return f"the command ended with status {self.process.returncode}"
        if time.monotonic() - self.since_s > _PATIENCE_S:
            return f"nothing has come for {_PATIENCE_S:g} s"
        return ""


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return True
    return False


class InstanceStarter:
    """Of one server. url: where it answers."""

    def __init__(self, options: ServeOptions, url: str, port: int):
        self._command, self._url, self._port = options.start_instance_command, url, port
        self._engine = options.engine
        self._ranks = {"prefill": options.prefill_ranks, "decode": options.decode_ranks}
        self.pending: list[PendingStart] = []
        self._reading: set[asyncio.Future] = set()  # what commands write; they may run for as long as the instance

    def num_pending(self, role: str) -> int:
        return sum(one.role == role for one in self.pending)

    async def start(self, role: str, num_ranks: int | None = None) -> PendingStart:
        """Returns once the processes run. num_ranks: None for as many as others of the role have. ApiError says why no
        instance comes."""
        ranks = num_ranks or self._ranks[role]
        if why := why_no_teams(self._engine, ranks):
            raise ApiError(400, f"ranks={ranks}: {why}", code="invalid_value", param="ranks")
        if self._command is None:
            started = await asyncio.to_thread(self._ask_launcher, role, ranks)
        else:
            if num_ranks not in (None, self._ranks[role]) and "{ranks}" not in self._command:
                message = f"ranks={num_ranks}: --start-instance-command has no {{ranks}}, so it could not know"
                raise ApiError(400, message, code="invalid_value", param="ranks")
            started = await self._run_command(role, ranks)
        self.pending.append(started)
        _log.info("%s is started", started)
        return started

    def _ask_launcher(self, role: str, num_ranks: int) -> PendingStart:
        request = JoinRequest(None, eprt.__version__, None, role, num_ranks, by_launcher=True)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(_COMMAND_S)
                sock.connect(door_name(self._port))
                send_line(sock, request)
                answer, _ = receive_line(sock, JoinAnswer)
        except (OSError, ValueError) as error:
            why = f"the server's launcher does not answer ({error}); start one with `eprt join {self._url}`"
            raise _failed(role, why) from None
        if answer.started is None:
            raise _failed(role, answer.error or "the launcher starts none")
        return PendingStart(role, num_ranks, answer.started, tuple(answer.pids))

    async def _run_command(self, role: str, num_ranks: int) -> PendingStart:
        assert self._command is not None, "asked for by the caller"
        words = command_words(self._command, role=role, ranks=num_ranks, url=self._url)
        pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            # Of its own session: it may be what keeps the instance running.
            process = await asyncio.create_subprocess_exec(
                *words, stdin=none, stdout=none, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            raise _failed(role, f"{words[0]}: {error.strerror}") from None
        reading = asyncio.ensure_future(_last_line(process))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        with contextlib.suppress(TimeoutError):
            line = await asyncio.wait_for(asyncio.shield(reading), _COMMAND_S)
            if status := await process.wait():
                raise _failed(role, f"{shlex.join(words)}: status {status}{': ' if line else ''}{line}")
        return PendingStart(role, num_ranks, process=process)

    # -- what becomes of them --

    def on_hello(self, name: str, role: str, known: Collection[str]) -> None:
        """A new instance has come. known: names that the launcher gave."""
        found = next((one for one in self.pending if one.name == name), None)
        if found is None and name not in known:
            found = next((one for one in self.pending if not one.name and one.role == role), None)
        if found is not None:
            self.pending.remove(found)

    def drop_failed(self) -> list[PendingStart]:
        """Those that do not come any more; the log says why."""
        failed = [(one, why) for one in self.pending if (why := one.why_failed())]
        for one, why in failed:
            self.pending.remove(one)
            _log.warning("%s does not come: %s", one, why)
        return [one for one, _ in failed]


async def _last_line(process: asyncio.subprocess.Process) -> str:
    """Of what it writes on standard error, until it closes that; the rest is read, so that it need not wait."""
    assert process.stderr is not None, "it is a pipe"
    last = b""
    while line := await process.stderr.readline():
        last = line.strip() or last
    return last.decode(errors="replace")[:200]


def _failed(role: str, why: str) -> ApiError:
    return ApiError(500, f"no {role} instance was started: {why}", code="start_failed")
