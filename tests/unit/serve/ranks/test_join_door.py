"""JoinDoor: who gets the place of a rank that is gone, and who is refused by name while nothing changes."""

import contextlib
import os
import socket
import threading
from types import SimpleNamespace

import msgspec
import pytest

import eprt
from eprt.ep.group.host_board import HostBoard
from eprt.serve.fingerprint import fingerprint
from eprt.serve.flags import parse_options
from eprt.serve.options import RankConfig
from eprt.serve.ranks.instance_slots import InstanceSlots
from eprt.serve.ranks.join_door import (
    JoinAnswer,
    JoinDoor,
    JoinedProcess,
    JoinRequest,
    door_name,
    receive_line,
    send_line,
)
from eprt.serve.ranks.slots import RankSlots
from tests.unit.cases import MODEL

PORT = 1_000_000 + os.getpid()  # of no server: only a part of the door's name


@pytest.fixture
def door(capsys):
    """The door of four ranks, of which 0 and 2 run."""
    options = parse_options(["--model", str(MODEL), "--skip-tokenizer-init", "-n", "4", "--max-lost-ranks", "1"])
    with contextlib.closing(HostBoard.create(4)) as board:
        slots = RankSlots(RankConfig(options, 0, 4, board.fd, "unix:x", "secret", os.getpid()), board)
        for rank in (0, 2):
            slots.add_process(rank, SimpleNamespace(pid=1000 + rank, poll=lambda: None))  # type: ignore[arg-type]
        with contextlib.closing(JoinDoor(slots, PORT, lambda: fingerprint(str(MODEL)))) as made:
            made.slots = slots  # type: ignore[attr-defined]
            yield made


def ask(door: JoinDoor, request: JoinRequest, pid: int | None = None) -> tuple[JoinAnswer, list[int]]:
    """What the door answers; pid: sent back, None to go away instead."""
    answering = threading.Thread(target=door.answer)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(door_name(PORT))
        answering.start()
        send_line(sock, request)
        answer, fds = receive_line(sock, JoinAnswer, max_fds=1)
        if pid is not None:
            send_line(sock, JoinedProcess(pid))
    answering.join(60)
    assert not answering.is_alive()
    return answer, fds


def request(rank: int | None = None, version: str = eprt.__version__, model: str | None = None) -> JoinRequest:
    return JoinRequest(rank, version, model)


def test_the_first_place_that_is_free_with_the_board(door):
    answer, fds = ask(door, request(), pid=os.getpid())
    assert answer.error is None and answer.config is not None
    config = answer.config
    assert (config.rank, config.num_ranks, config.joins, config.token) == (1, 4, True, "secret")
    assert config.options.engine.model_dir == str(MODEL)
    with contextlib.closing(HostBoard(fds[0], 4)) as board:
        board.write_value(1, 0, b"here")
    assert door.slots.pid_of_rank == {0: 1000, 2: 1002, 1: os.getpid()}


def test_a_place_by_number_and_the_same_model(door):
    answer, fds = ask(door, request(3, model=fingerprint(str(MODEL))), pid=os.getpid())
    assert answer.config is not None and answer.config.rank == 3
    os.close(fds[0])


@pytest.mark.parametrize(
    "asked, words",
    [
        (request(2), r"--rank 2: that rank runs \(pid 1002\); free: \[1, 3\]"),
        (request(4), r"--rank 4: the server has the ranks 0..3"),
        (request(-1), r"--rank -1: the server has the ranks 0..3"),
        (request(version="0.0"), rf"the server runs eprt {eprt.__version__}, this is eprt 0.0"),
        (request(model="another"), "another model than the server's"),
    ],
)
def test_wrong_use_is_refused_by_name_and_nothing_changes(door, asked, words):
    import re

    answer, fds = ask(door, asked)
    assert answer.config is None and not fds
    assert re.search(words, answer.error or ""), answer.error
    assert door.slots.pid_of_rank == {0: 1000, 2: 1002}


def test_no_place_where_all_run(door):
    for rank in (1, 3):
        door.slots.add_process(rank, SimpleNamespace(pid=rank, poll=lambda: None))
    assert ask(door, request())[0].error == "all 4 ranks run: there is no place to join"


def test_a_joiner_that_goes_away_leaves_the_place_free(door):
    _, fds = ask(door, request(1))
    os.close(fds[0])
    assert 1 not in door.slots.pid_of_rank
    door.answer()  # nobody asks: returns at once


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\n",
        b"[" * 60_000 + b"\n",
        b'{"a":' * 10_000 + b"\n",
        b"\xff" * 70_000,
        b'{"rank":"\xff"}\n',
    ],
    ids=["http", "empty", "deep list", "deep object", "endless", "no UTF-8"],
)
def test_bytes_that_are_no_request_are_dropped(door, line):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(door_name(PORT))
        sock.sendall(line)
        door.answer()
        with contextlib.suppress(ConnectionResetError):  # what it did not read
            assert sock.recv(1) == b""
    assert door.slots.pid_of_rank == {0: 1000, 2: 1002}


def test_a_line_that_comes_byte_by_byte_does_not_hold_the_launcher(monkeypatch):
    """One byte a second."""
    times = iter(range(10))
    monkeypatch.setattr("eprt.serve.ranks.join_door.time.monotonic", lambda: float(next(times)))
    mine, theirs = socket.socketpair()
    monkeypatch.setattr("socket.recv_fds", lambda *given: (b"{", [], 0, None))
    with mine, theirs, pytest.raises(ValueError, match="no whole line within 2 s"):
        receive_line(mine, JoinRequest)


def test_a_second_server_at_the_port_says_that_none_can_join_it(door, capsys):
    JoinDoor(door.slots, PORT, str).close()
    assert "`eprt join` cannot reach this server" in capsys.readouterr().err


def test_an_instance_is_told_its_gpus_or_why_it_gets_none(tmp_path):
    options = parse_options(["--model", str(MODEL), "--prefill", "1", "--decode", "1", "--device", "cuda"])
    config = RankConfig(options, 0, 2, -1, "unix:x", "secret", os.getpid())
    slots = InstanceSlots(config, ["a", "b", "c"])  # two are those of the start
    asked = JoinRequest(None, eprt.__version__, None, "decode", 1, gpus=["b", "a"])
    with contextlib.closing(JoinDoor(slots, PORT, str)) as door:
        unseen = ask(door, asked)[0].error
        assert unseen == "this shell does not see the server's GPU c: give it the server's CUDA_VISIBLE_DEVICES"
        asked = msgspec.structs.replace(asked, gpus=["b", "d", "c", "a"])
        answer, _ = ask(door, asked, pid=os.getpid())
        assert answer.config is not None and answer.config.gpus == ("c",)
        for by_launcher in (False, True):
            refused = ask(door, msgspec.structs.replace(asked, by_launcher=by_launcher))[0].error
            assert refused is not None and "of 3 GPUs, other instances' ranks have 3, which leaves 0" in refused
