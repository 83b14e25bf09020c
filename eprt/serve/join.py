"""`eprt join URL`: replaces a lost rank of a running server by one of this shell, or adds a whole instance (--role).

The launcher of the same host and user hands out the place (ranks/join_door.py); the ranks are children of this process,
which waits for them. Ctrl-C and SIGTERM ask the server to retire them; a second signal kills them. Knows nothing of
what a rank does.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

import eprt
from eprt import env
from eprt.ep.group.host_board import HostBoard
from eprt.serve.device_check import visible_gpus
from eprt.serve.errors import print_line
from eprt.serve.far_join import ask_server, is_of_this_host
from eprt.serve.fingerprint import fingerprint
from eprt.serve.model_source import find_model_dir
from eprt.serve.options import ROLES, RankConfig
from eprt.serve.ranks.join_door import (
    JoinAnswer,
    JoinedProcess,
    JoinRequest,
    door_name,
    peer_uid,
    receive_line,
    send_line,
)
from eprt.serve.ranks.processes import start_rank
from eprt.serve.ranks.slots import RankSlots

_REQUEST_S = 10.0


class JoinedInstance:
    """All ranks of an instance, as one process. config: of any of them."""

    def __init__(self, config: RankConfig, slots: RankSlots):
        assert config.instance is not None, "it has a name"
        self._name, self._slots = config.instance.name, slots
        self._statuses: list[int] = []  # of those that have ended

    def __str__(self) -> str:
        return self._name

    def wait(self, timeout_s: float) -> int:
        """0 where all ranks have left, 2 where one was refused, else 1. subprocess.TimeoutExpired while any runs."""
        deadline_s = time.monotonic() + timeout_s
        while self._slots.num_running:
            self._statuses += [end.status for end in self._slots.reap()]
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(self._name, timeout_s)
            time.sleep(0.02)
        return 0 if not any(self._statuses) else 2 if 2 in self._statuses else 1

    def kill(self) -> None:
        self._slots.send_signal(signal.SIGKILL)


class JoinError(ValueError):
    """Why no process can join; str() is the one line to print."""


def main(argv: list[str] | None = None) -> int:
    """0 once the rank was retired or the server has ended, 1 where the rank was lost, 2 where it could not join."""
    parser = argparse.ArgumentParser(prog="eprt join", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("url", metavar="URL", help="the server's address, such as http://127.0.0.1:8000")
    parser.add_argument("--rank", type=int, metavar="R", help="the lost rank to replace; default: the first one")
    text = "start a whole instance of a server with --decode: prefill or decode"
    parser.add_argument("--role", choices=ROLES, help=text)
    parser.add_argument(
        "-n", "--ranks", dest="num_ranks", type=int, metavar="N", help="ranks of the instance, default 1"
    )
    text = "the same model in another directory; default: the server's directory"
    parser.add_argument("--model", metavar="DIR", help=text)
    text = "the server's admin key, to retire the rank on Ctrl-C; default: EPRT_ADMIN_KEY, EPRT_API_KEY"
    parser.add_argument("--api-key", metavar="KEY", help=text)
    arguments = parser.parse_args(argv)
    try:
        _check_arguments(arguments)
        key = arguments.api_key or _key_of_environment()
        if arguments.role is not None:
            given = arguments.url, arguments.role, arguments.num_ranks or 1, arguments.model
            instance = _join_instance(*given) if is_of_this_host(arguments.url) else _join_from_afar(*given, key)
            print_line(f"eprt: instance {instance} joins {arguments.url}", sys.stdout)
            return _wait(instance, lambda: _retire_instance(arguments.url, str(instance), key))
        process, rank = _join(arguments.url, arguments.rank, arguments.model)
    except JoinError as error:
        print_line(f"eprt join: error: {error}")
        return 2
    print_line(f"eprt: rank {rank} (pid {process.pid}) joins {arguments.url}", sys.stdout)
    return _wait(process, lambda: _retire(arguments.url, rank, key))


def _key_of_environment() -> str | None:
    try:
        return env.admin_key()
    except ValueError as error:
        raise JoinError(str(error)) from None


def _check_arguments(arguments: argparse.Namespace) -> None:
    try:
        _ = urlsplit(arguments.url).port
    except ValueError:
        raise JoinError(f"{arguments.url}: give the server's URL with its port, as http://127.0.0.1:8000") from None
    if arguments.role is None and arguments.num_ranks is not None:
        raise JoinError(f"-n {arguments.num_ranks}: is of an instance; give --role too, or leave it out")
    if arguments.role is not None and arguments.rank is not None:
        raise JoinError(f"--rank {arguments.rank}: an instance brings all its ranks; leave it out")
    if arguments.num_ranks is not None and arguments.num_ranks < 1:
        raise JoinError(f"-n {arguments.num_ranks}: must be at least 1")


def _join(url: str, rank: int | None, model_dir: str | None) -> tuple[subprocess.Popen, int]:
    """The rank's process, and which rank it is."""
    with _ask(url, JoinRequest(rank, eprt.__version__, None), model_dir) as (sock, config, fds, model_dir):
        process = start_rank(_config(config, fds[0], model_dir))
        os.close(fds[0])
        with contextlib.suppress(OSError):  # the server has ended; so will the rank
            send_line(sock, JoinedProcess(process.pid))
    return process, config.rank


def _join_instance(url: str, role: str, num_ranks: int, model_dir: str | None) -> JoinedInstance:
    request = JoinRequest(None, eprt.__version__, None, role, num_ranks, gpus=visible_gpus())
    with _ask(url, request, model_dir) as (sock, config, _, model_dir):
        board = HostBoard.create(num_ranks)
        config = _config(config, board.fd, model_dir)
        with contextlib.suppress(OSError):
            send_line(sock, JoinedProcess(os.getpid()))
    return _start_instance(config, board)


def _join_from_afar(url: str, role: str, num_ranks: int, model_dir: str | None, key: str | None) -> JoinedInstance:
    """The server is on another host."""
    try:
        config = ask_server(url, role, num_ranks, model_dir and _checked_dir(model_dir), key)
    except ValueError as error:
        raise JoinError(str(error)) from None
    board = HostBoard.create(num_ranks)
    return _start_instance(msgspec.structs.replace(config, board_fd=board.fd), board)


def _start_instance(config: RankConfig, board: HostBoard) -> JoinedInstance:
    config = msgspec.structs.replace(config, launcher_pid=os.getpid())
    slots = RankSlots(config, board)
    slots.start_all()
    return JoinedInstance(config, slots)


def _checked_dir(model_dir: str) -> str:
    """Of --model, absolute: the rank may be in another directory."""
    try:
        found = os.path.abspath(find_model_dir(model_dir))
    except ValueError as error:
        raise JoinError(str(error)) from None
    if not (Path(found) / "config.json").is_file():
        raise JoinError(f"--model {found}: has no config.json")
    return found


@contextlib.contextmanager
def _ask(
    url: str, request: JoinRequest, model_dir: str | None
) -> Iterator[tuple[socket.socket, RankConfig, list[int], str | None]]:
    """The door's answer, its descriptors and the model's directory. JoinError says why it does not let us in."""
    try:
        port = urlsplit(url).port
    except ValueError:
        port = None
    if port is None:
        raise JoinError(f"{url}: give the server's URL with its port, as http://127.0.0.1:8000")
    if model_dir is not None:
        model_dir = _checked_dir(model_dir)
        try:
            request = msgspec.structs.replace(request, model=fingerprint(model_dir))
        except OSError as error:
            raise JoinError(f"--model {model_dir}: cannot be read: {error.strerror or error}") from None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(door_name(port))
            if peer_uid(sock) != os.geteuid():
                raise JoinError(f"{url}: the server belongs to another user")
            send_line(sock, request)
            answer, fds = receive_line(sock, JoinAnswer, max_fds=1)
        except JoinError:
            raise
        except (OSError, ValueError) as error:
            why = (isinstance(error, OSError) and error.strerror) or error
            raise JoinError(
                f"{url}: no server of this host with --max-lost-ranks or --decode takes ranks at port {port} ({why}): "
                "is it up, is that its HTTP port, and is this the same network namespace (container)?"
            ) from None
        if answer.config is None:
            raise JoinError(f"{url}: {answer.error}")
        yield sock, answer.config, fds, model_dir


def _config(config: RankConfig, board_fd: int, model_dir: str | None) -> RankConfig:
    options = config.options
    if model_dir is not None:
        options = replace(options, engine=replace(options.engine, model_dir=model_dir))
    return msgspec.structs.replace(config, board_fd=board_fd, options=options)


def _wait(process: "subprocess.Popen | JoinedInstance", retire: Callable[[], bool]) -> int:
    """Until the rank, or the instance, has ended; its exit status."""
    caught: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda taken, frame: caught.append(taken))
    num_seen = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(0.2)
            return status if status >= 0 else 1
        if len(caught) > num_seen:
            num_seen = len(caught)
            if num_seen > 1 or not retire():
                process.kill()


def _retire(url: str, rank: int, api_key: str | None) -> bool:
    """Asks the server to let the rank go; False, with a line, where it refuses."""
    return _change(f"{url.rstrip('/')}/v1/eprt/ranks/{rank}/retire", "POST", f"rank {rank}", api_key)


def _retire_instance(url: str, name: str, api_key: str | None) -> bool:
    """The same of an instance."""
    return _change(f"{url.rstrip('/')}/v1/eprt/instances/{name}", "DELETE", f"instance {name}", api_key)


def _change(url: str, method: str, who: str, api_key: str | None) -> bool:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url, b"" if method == "POST" else None, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_REQUEST_S):
            return True
    except urllib.error.HTTPError as error:
        print_line(f"eprt join: {who} cannot retire: {error.read().decode(errors='replace')}")
    except OSError as error:
        print_line(f"eprt join: {who} cannot retire: {error}")
    return False


if __name__ == "__main__":
    sys.exit(main())
