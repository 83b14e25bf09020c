"""Like launch.py, for EPGroup.from_host: plain processes with a board between them, as eprt's launcher starts them."""

import contextlib
import json
import subprocess
import sys
from importlib import import_module

from eprt import env
from eprt.ep.group.host_board import HostBoard
from tests.ranks.launch import PATIENCE, ROOT
from tests.ranks.launch_torch import finish


def start_host_rank(board: HostBoard, rank: int, target: str, *, joins: bool = False, **kwargs) -> subprocess.Popen:
    """The process of one rank, which calls target ("module:function") with (group, **kwargs)."""
    arguments = [str(board.fd), str(board.size), str(rank), str(int(joins))]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.ranks.launch_host", target, json.dumps(kwargs), *arguments],
        cwd=ROOT,
        env={**env.without_mpi(), **PATIENCE},
        pass_fds=(board.fd,),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_host_ranks(num_ranks: int, target: str, *, timeout_s: float = 600, **kwargs) -> list[tuple[int, str]]:
    """Calls target on every rank; exit status and output of each."""
    with contextlib.closing(HostBoard.create(num_ranks)) as board:
        return finish([start_host_rank(board, rank, target, **kwargs) for rank in range(num_ranks)], timeout_s)


def main() -> None:
    target, kwargs, *numbers = sys.argv[1:]
    board_fd, num_ranks, rank, joins = map(int, numbers)
    from eprt import EPGroup

    group = EPGroup.from_host(HostBoard(board_fd, num_ranks), rank, joins=bool(joins))
    module, function = target.split(":")
    getattr(import_module(module), function)(group, **json.loads(kwargs))
    group.close()


if __name__ == "__main__":
    main()
