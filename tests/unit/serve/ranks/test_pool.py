"""What the frontend tells of ranks that go while the server drains."""

import asyncio
from unittest.mock import Mock

import pytest

from eprt.serve.flags import parse_options
from eprt.serve.options import FrontendConfig
from eprt.serve.ranks.messages import Drain, Fatal
from eprt.serve.ranks.pool import Rank, RankPool
from eprt.serve.ranks.request_metrics import RequestMetrics
from tests.serve.conftest import MODEL


def _told(signal: str, fatal: str | None) -> str:
    """The reason of a server of two ranks that was told to drain by this signal and then lost rank 1."""

    async def drain_and_lose() -> str:
        config = FrontendConfig(parse_options(["--model", str(MODEL)]), 2, "token", -1, -1, -1)
        pool = RankPool(config, RequestMetrics(), on_drain=lambda reason, rank: pool.set_state("draining", reason))
        pool.ranks = {rank: Rank(rank, 100 + rank, "host", Mock()) for rank in range(2)}
        pool.set_state("serving", "")
        pool._on_message(pool.ranks[0], Drain(signal))
        if fatal is not None:
            pool._on_message(pool.ranks[1], Fatal(fatal))
        pool._on_closed(pool.ranks[1], is_rank0=False)
        assert pool.state == "lost" and pool.ended.is_set()
        return pool.reason

    return asyncio.run(drain_and_lose())


@pytest.mark.parametrize("signal", ["SIGUSR1", "mpirun (pid 7) is gone"])
def test_a_rank_lost_in_a_drain_is_named(signal, capfd):
    assert _told(signal, None) == "rank 1 (pid 101, host host) was lost: its process is gone"
    assert _told(signal, "a NaN") == "rank 1 (pid 101, host host) failed: a NaN"
    assert "eprt: rank 1 (pid 101, host host) failed: a NaN" in capfd.readouterr().err


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
def test_ranks_that_mpirun_kills_are_not_called_lost(signal):
    assert _told(signal, None) == "the ranks were ended before running requests were done (use -n to drain)"
