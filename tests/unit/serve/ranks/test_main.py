"""A rank's process before it serves: ranks that were not started as one server are told so in one line."""

import socket

import msgspec
import pytest

from eprt.ep.errors import RankLostError
from eprt.ep.group.group import EPGroup
from eprt.serve.fingerprint import fingerprint
from eprt.serve.flags import parse_options
from eprt.serve.options import REFUSED, RankConfig, common_flags
from eprt.serve.ranks import main as rank_main
from eprt.serve.ranks.messages import Fatal, Refused, ToFrontend, Unpacker, pack
from tests.gather_group import GatherGroup
from tests.unit.cases import MODEL


class _GroupWithOthers(GatherGroup):
    """The rank 0 of a group whose others give these."""

    def __init__(self, *others):
        self.rank, self.size, self.others = 0, 1 + len(others), others

    def allgather(self, value):
        return [value, *self.others]

    def barrier(self) -> None: ...

    def close(self) -> None: ...


def _options(*arguments: str):
    return parse_options(["--model", str(MODEL), *arguments])


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--num-speculative-tokens", "1"], "rank 1 has --num-speculative-tokens 1, rank 0 has 0"),
        (["--max-model-len", "64"], "rank 1 has --max-model-len 64, rank 0 has the default"),
        (["--no-prefix-cache"], "rank 1 has --no-prefix-cache True, rank 0 has False"),
        (["--diagnose-log-mb", "2"], "rank 1 has --diagnose-log-mb 2, rank 0 has 1024"),
        (["--inject", "slow-rank:1:2x"], "rank 1 has --inject slow-rank:1:2x, rank 0 has none"),
        (["--api-key", "secret"], "rank 1 has another --api-key than rank 0"),
        (["-n", "2"], "rank 1 has -n 2, rank 0 has the default"),
    ],
)
def test_flags_of_one_rank_only_are_refused(arguments, words, capfd, monkeypatch):
    group = _GroupWithOthers(common_flags(_options("--port", "0", *arguments)))
    monkeypatch.setattr(EPGroup, "from_mpi", staticmethod(lambda: group))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert rank_main.run(_options("--port", "0")) == 2
    told = capfd.readouterr().err
    assert told == f"eprt serve: error: {words}; give all ranks the same flags\n", told


def test_a_rank_that_mpi_took_for_a_job_of_its_own_does_not_serve(capfd, monkeypatch):
    monkeypatch.setattr(EPGroup, "from_mpi", staticmethod(_GroupWithOthers))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert rank_main.run(_options("--port", "0")) == 2
    told = capfd.readouterr().err
    assert told.startswith("eprt serve: error: mpirun started 3 ranks, and MPI has 1: ") and told.count("\n") == 1, told


def test_a_group_that_cannot_be_is_one_line(capfd, monkeypatch):
    def from_mpi():
        raise ValueError("[rank 0/2] EPRT_RANKS_PER_NODE differs between ranks: [None, 1]")

    monkeypatch.setattr(EPGroup, "from_mpi", staticmethod(from_mpi))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert rank_main.run(_options("--port", "0")) == 2
    assert capfd.readouterr().err.startswith("eprt serve: error: [rank 0/2] EPRT_RANKS_PER_NODE differs")


def _joiner(model_dir, known: str) -> RankConfig:
    options = parse_options(["--model", str(model_dir), "-n", "2", "--max-lost-ranks", "1", "--skip-tokenizer-init"])
    return RankConfig(options, 1, 2, -1, "unix:eprt-nobody", "token", 1, joins=True, fingerprint=known)


def test_a_rank_whose_checkpoint_has_changed_since_the_others_loaded_it_does_not_ask(capfd, monkeypatch):
    monkeypatch.setattr(rank_main, "connect", lambda *_, **__: pytest.fail("it must not connect"))
    assert rank_main.run_launched(_joiner(MODEL, "another")) == REFUSED
    told = capfd.readouterr().err
    assert told.startswith("eprt: rank 1 cannot join: ") and "or its weights have changed" in told, told


def test_a_rank_whose_checkpoint_cannot_be_read_says_so(capfd, tmp_path):
    (tmp_path / "config.json").write_text((MODEL / "config.json").read_text())
    config = _joiner(tmp_path, "known")
    (tmp_path / "config.json").unlink()
    assert rank_main.run_launched(config) == REFUSED
    assert f"rank 1 cannot join: {tmp_path}: No such file" in capfd.readouterr().err


@pytest.mark.parametrize("known", ["", fingerprint(str(MODEL))])
def test_a_rank_of_the_same_checkpoint_asks(monkeypatch, known):
    monkeypatch.setattr(rank_main, "connect", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rank_main.run_launched(_joiner(MODEL, known))


def test_a_rank_that_is_lost_while_the_others_meet_is_named_by_them(monkeypatch):
    mine, frontends = socket.socketpair()

    def from_host(*_, **__):
        raise RankLostError(0, 3, 1, "set-up")

    ended: list[int] = []
    monkeypatch.setattr(rank_main, "connect", lambda *_, **__: mine)
    monkeypatch.setattr(rank_main, "_leave_on_signals", lambda channel: None)
    monkeypatch.setattr(EPGroup, "from_host", from_host)
    monkeypatch.setattr(rank_main, "HostBoard", lambda fd, size: None)
    monkeypatch.setattr("eprt.serve.ranks.worker.os._exit", lambda status: ended.append(status) or 1 / 0)
    with mine, frontends:
        frontends.shutdown(socket.SHUT_WR)
        with pytest.raises(ZeroDivisionError):
            rank_main.run_launched(msgspec.structs.replace(_joiner(MODEL, ""), joins=False))
        _, fatal = Unpacker(ToFrontend).add_bytes(frontends.recv(1 << 16))
    assert ended == [1] and isinstance(fatal, Fatal) and fatal.lost_rank == 1
    assert "rank 1 died during set-up" in fatal.message and "Traceback" not in fatal.message


def test_a_refused_process_touches_nothing_of_the_rank_that_has_its_slot(capfd, monkeypatch):
    mine, frontends = socket.socketpair()
    monkeypatch.setattr(rank_main, "connect", lambda *_, **__: mine)
    monkeypatch.setattr(EPGroup, "from_host", lambda *_, **__: pytest.fail("it must not touch the slot's lock"))
    monkeypatch.setattr(rank_main, "_leave_on_signals", lambda channel: None)
    with mine, frontends:
        frontends.sendall(pack(Refused("slot 1 is taken")))
        frontends.shutdown(socket.SHUT_WR)
        assert rank_main.run_launched(_joiner(MODEL, "")) == REFUSED
    assert "eprt: rank 1 cannot join: slot 1 is taken" in capfd.readouterr().err
