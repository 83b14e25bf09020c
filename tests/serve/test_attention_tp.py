"""Servers whose ranks share attention: the answers of one rank, and what clients hear of a rank that dies."""

import os
import signal

import pytest

from eprt.serve.running import RunningServer
from tests.serve.conftest import MODEL
from tests.serve.processes import PATIENCE_S, ranks_of
from tests.serve.test_instances import ask_all
from tests.serve.test_lifecycle import Stream, all_tell_of_lost_rank

OPTIONS = ("--num-speculative-tokens", "1", "--page-size", "8")
INSTANCES = ("--prefill", "1", "--prefill-ranks", "2", "--decode", "1", "--decode-ranks", "2")


@pytest.fixture(scope="module")
def alone():
    with RunningServer(MODEL, 1, *OPTIONS) as server:
        return ask_all(server, range(8))


def test_answers_are_those_of_one_rank_until_one_dies(alone):
    with RunningServer(MODEL, 2, "--attention-tp", "2", *OPTIONS) as server:
        assert ask_all(server, range(8)) == alone
        assert "eprt: teams of 2 ranks share attention (form gather)" in server.output()
        streams = [Stream(server.url), Stream(server.url)]
        pid = ranks_of(server.url)[1]
        os.kill(pid, signal.SIGKILL)
        all_tell_of_lost_rank(streams, 1, pid, PATIENCE_S)
        assert server.process.wait(PATIENCE_S) == 1


def test_prefill_and_decode_instances_are_teams(alone):
    more = ("--attention-tp", "2", "--prompt-ranks", "2", "--local-prefill-tokens", "0")
    with RunningServer(MODEL, 0, *INSTANCES, *more, *OPTIONS, timeout_s=2 * PATIENCE_S) as server:
        assert ask_all(server, range(8)) == alone
