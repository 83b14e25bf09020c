"""One rank's process, from joining the group to its exit status. Under mpirun rank 0 also starts the HTTP frontend.

There the order matters: rank 0 binds the HTTP port before anything slow, so that a port in use shows at once, and hands
the open sockets to the frontend, which is therefore reachable (and answers 503) while the model loads. Knows nothing of
requests.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from eprt import env
from eprt.ep.group.agreement import first_difference
from eprt.ep.group.group import EPGroup
from eprt.ep.group.host_board import HostBoard
from eprt.serve.certificate import check_certificate, tell_refused_certificate
from eprt.serve.device_check import check_device
from eprt.serve.errors import print_line
from eprt.serve.fingerprint import fingerprint
from eprt.serve.key_sources import read_keys, tell_open_files
from eprt.serve.keys import ServerKeys
from eprt.serve.options import (
    REFUSED,
    SECRET_FLAGS,
    FrontendConfig,
    OptionError,
    RankConfig,
    ServeOptions,
    common_flags,
    make_diagnose_dir,
)
from eprt.serve.rank_fit import check_ranks
from eprt.serve.ranks import worker
from eprt.serve.ranks.channel import Channel, FrontendLostError, bind_http, connect, listen
from eprt.serve.ranks.messages import Drain, Hello
from eprt.serve.ranks.processes import start_frontend
from eprt.serve.ranks.start_engine import wait_admitted


def run(options: ServeOptions) -> int:
    """Serves until told to stop, as a rank of mpirun or alone; returns the exit status."""
    _start_logging()
    launched_rank, starter = env.launched_rank(), os.getppid()
    if options.max_lost_ranks:
        raise OptionError("--max-lost-ranks: needs ranks that eprt starts on one host; leave out mpirun")
    if options.num_instances:
        raise OptionError("--decode: needs instances that eprt starts on one host; leave out mpirun")
    check_device(options)
    http, keys = None, ServerKeys()
    if not launched_rank:
        keys = read_keys(options)
        tell_open_files(options)
        check_certificate(options)
        tell_refused_certificate(options)
        http = bind_http(options.host, options.port)
        make_diagnose_dir(options)
    try:
        group = EPGroup.single() if launched_rank is None else EPGroup.from_mpi()
        _check_job(options, group)
    except ValueError as error:
        # All ranks have found it: MPI lets none of them end before rank 0 has printed it.
        if not launched_rank:
            print_line(f"eprt serve: error: {error}")
        return 2
    sock, frontend, token = _connect(options, group, http, keys)
    channel = Channel(sock, Hello(token, group.rank, os.getpid(), socket.gethostname()))
    try:
        _leave_on_signals(channel)
        if launched_rank is not None:
            channel.watch_starters(starter)
        loading = worker.beat_while_loading(channel, lambda: group.current_wait)
        worker.serve(options, group, channel, loading=loading)
    except FrontendLostError:
        return _report_lost_frontend(frontend)
    group.close()
    return frontend.wait(timeout=30) if frontend else 0


def run_launched(config: RankConfig) -> int:
    """The same as a rank of eprt's launcher, on which nothing depends but this rank."""
    _start_logging()
    if why := _other_model(config):
        print_line(f"eprt: rank {config.rank} cannot join: {why}")
        return REFUSED
    try:
        sock = connect(config.endpoint, timeout_s=env.get("EPRT_TIMEOUT_S"))
    except ConnectionError as error:
        print_line(f"eprt: rank {config.rank}: {error}")
        return 1
    channel = Channel(sock, Hello(config.token, config.rank, os.getpid(), socket.gethostname(), config.instance))
    try:
        _leave_on_signals(channel)
        channel.watch_process("the launcher", config.launcher_pid)
        if config.joins:  # before it touches the slot's lock, which another process may hold
            wait_admitted(channel)
        group: EPGroup | None = None
        loading = worker.beat_while_loading(channel, lambda: None if group is None else group.current_wait)
        group = _join_group(config, channel)
        if config.num_host_ranks:
            group.num_ranks_on_host = config.num_host_ranks
        group.gpus = config.gpus
        worker.serve(config.options, group, channel, config.first_rank, loading)
    except FrontendLostError:
        os._exit(1)  # the launcher tells why; other ranks may be inside a step that waits for this one
    except OptionError as error:  # the frontend does not take it in
        print_line(f"eprt: rank {config.rank} cannot join: {error}")
        return REFUSED
    group.close()
    return 0


def _join_group(config: RankConfig, channel: Channel) -> EPGroup:
    """With the ranks of other hosts, if there are any. A failure goes to the frontend, and ends this process."""
    try:
        return _make_group(config)
    except Exception as error:
        worker.fail(error, channel)


def _make_group(config: RankConfig) -> EPGroup:
    if config.wire is None:
        assert config.board_fd is not None, "without a wire ranks share a board"
        board = HostBoard(config.board_fd, config.num_ranks)
        elastic = config.options.max_lost_ranks > 0
        return EPGroup.from_host(board, config.rank, joins=config.joins, elastic=elastic)
    from eprt.ep.wire.wire_group import WireGroup

    listener = None
    if config.wire.listener_fd is not None and config.rank == 0:
        listener = socket.socket(fileno=config.wire.listener_fd)
    wire, key = config.options.wire or "tcp", config.wire.key
    return WireGroup(config.wire.meeting, config.rank, config.num_ranks, wire=wire, key=key, listener=listener)


def _other_model(config: RankConfig) -> str:
    """Why a rank that joins would compute with other weights than the others, "" where it would not."""
    model_dir = config.options.engine.model_dir
    if not config.fingerprint:  # it starts with the others: what is wrong with the directory, loading says
        return ""
    try:
        if config.fingerprint == fingerprint(model_dir):
            return ""
    except OSError as error:
        return f"{model_dir}: {error.strerror or error}"
    return f"{model_dir} has another model than the others have loaded: its configuration or its weights have changed"


def _start_logging() -> None:
    level = env.get("EPRT_LOG_LEVEL").upper()
    logging.basicConfig(level=level, format="%(asctime)s eprt: %(message)s", stream=sys.stderr)


def _check_job(options: ServeOptions, group: EPGroup) -> None:
    """ValueError, on all ranks, where they were not started as one server. Collective."""
    launched = env.launched_size()
    if launched not in (None, group.size):
        # MPI makes a job of its own of a process that finds no launcher.
        raise ValueError(
            f"mpirun started {launched} ranks, and MPI has {group.size}: either mpirun was killed meanwhile (start "
            "again), or mpi4py uses another MPI than this mpirun belongs to (`eprt env` shows both)"
        )
    if differs := first_difference(group, common_flags(options)):
        if differs.name in SECRET_FLAGS:
            what = f"has another {differs.name} than rank 0"
        else:
            what = f"has {differs.name} {_shown(differs.value)}, rank 0 has {_shown(differs.of_rank0)}"
        raise ValueError(f"rank {differs.rank} {what}; give all ranks the same flags")
    if options.num_ranks not in (None, group.size):
        raise ValueError(f"-n {options.num_ranks}: this is an MPI job of {group.size} ranks already; leave out -n")
    check_ranks(options, group.size, group.num_nodes, "in this MPI job there", "give mpirun another -n")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else "the default" if value is None else str(value)


def _connect(
    options: ServeOptions, group: EPGroup, http: socket.socket | None, keys: ServerKeys
) -> tuple[socket.socket, subprocess.Popen | None, str]:
    """This rank's connection, the frontend's process (rank 0 only) and the run's secret. Collective."""
    hosts = set(group.allgather(socket.gethostname()))
    if group.rank != 0:
        endpoint, token = group.allgather(None)[0]
        return connect(endpoint, timeout_s=env.get("EPRT_TIMEOUT_S")), None, token
    assert http is not None, "rank 0 binds the HTTP port first"
    listener, endpoint = listen(hosts)
    mine, frontends = socket.socketpair()
    token = os.urandom(16).hex()
    fds = http.fileno(), listener.fileno(), frontends.fileno()
    config = FrontendConfig(options, group.size, token, *fds, keys=keys)
    frontend = start_frontend(config)
    for inherited in (http, listener, frontends):
        inherited.close()
    group.allgather((endpoint, token))
    return mine, frontend, token


def _leave_on_signals(channel: Channel) -> None:
    """While the model loads there is nothing to finish: tell the frontend and exit."""

    def leave(number: int, frame) -> None:
        with contextlib.suppress(FrontendLostError):
            channel.send(Drain(signal.Signals(number).name))
            channel.send_rest(timeout_s=1)
        os._exit(128 + number)

    for number in worker.STOP_SIGNALS:
        signal.signal(number, leave)


def _report_lost_frontend(frontend: subprocess.Popen | None) -> int:
    if frontend is None:
        time.sleep(1)  # rank 0 knows more and prints it; mpirun ends all ranks at the first status that is not 0
    else:
        try:
            status = frontend.wait(timeout=1)
        except subprocess.TimeoutExpired:
            status = None
        cause = f"killed by signal {-status}" if status is not None and status < 0 else f"exit status {status}"
        # A frontend that ends by its own decision (status 1) has said why; only its death is reported here.
        if status is None or status != 1:
            print_line(f"eprt: the HTTP frontend (pid {frontend.pid}) was lost: {cause}; stopping")
    # Not through MPI_Finalize: the other ranks may be inside a step that waits for this one.
    os._exit(1)
