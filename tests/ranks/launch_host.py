"""Like launch.py, for EPGroup.from_host: plain processes with a board between them, as eprt's launcher starts them."""

import contextlib
import json
from importlib import import_module

from eprt import env
from eprt.ep.group.host_board import HostBoard
from tests.ranks.forked import ForkedRank
from tests.ranks.launch import PATIENCE
from tests.ranks.launch_torch import finish


def start_host_rank(
    board: HostBoard, rank: int, target: str, *, joins: bool = False, elastic: bool = False, **kwargs
) -> ForkedRank:
    """The process of one rank, which calls target ("module:function") with (group, **kwargs). elastic: as HostGroup."""
    arguments = [target, json.dumps(kwargs), str(board.size), str(rank), str(int(joins)), str(int(elastic))]
    return ForkedRank(main, *arguments, environment={**env.without_mpi(), **PATIENCE}, fds=(board.fd,))


def run_host_ranks(num_ranks: int, target: str, *, timeout_s: float = 600, **kwargs) -> list[tuple[int, str]]:
    """Calls target on every rank; exit status and output of each."""
    with contextlib.closing(HostBoard.create(num_ranks)) as board:
        return finish([start_host_rank(board, rank, target, **kwargs) for rank in range(num_ranks)], timeout_s)


def main(board_fd: int, target: str, kwargs: str, *numbers: str) -> None:
    num_ranks, rank, joins, elastic = map(int, numbers)
    from eprt import EPGroup

    group = EPGroup.from_host(HostBoard(board_fd, num_ranks), rank, joins=bool(joins), elastic=bool(elastic))
    module, function = target.split(":")
    getattr(import_module(module), function)(group, **json.loads(kwargs))
    group.close()
