"""How the frontend's process and a rank's are started: each reads its configuration from standard input.

Both get a session of their own: what kills their starter (mpirun, Ctrl-C) leaves them time to finish. Knows nothing of
what they do.
"""

import contextlib
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from eprt import env
from eprt.serve.options import FrontendConfig, RankConfig


def start_frontend(config: FrontendConfig) -> subprocess.Popen:
    fds = (config.http_fd, config.listener_fd, config.rank0_fd, config.notify_fd, config.board_fd)
    return _start(["-m", "eprt.serve.frontend"], config, [fd for fd in fds if fd is not None], env.without_mpi())


def start_rank(config: RankConfig) -> subprocess.Popen:
    variables = env.of_server(config.variables)
    listener = config.wire.listener_fd if config.wire is not None and config.rank == 0 else None
    fds = [fd for fd in (config.board_fd, listener) if fd is not None]
    return _start(["-m", "eprt.serve.ranks", str(config.rank)], config, fds, variables)


def _start(
    arguments: list[str], config: msgspec.Struct, fds: Sequence[int], variables: dict[str, str]
) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        pass_fds=fds,
        env=variables,
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # it has ended already: its status tells
        stdin.write(msgspec.json.encode(config))
    return process
