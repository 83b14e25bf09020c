"""A server of two GPUs loses a rank in the midst of streams, goes on, and takes its successor in."""

import os
import signal

import pytest

from tests.gpu.gpus import MOST_RANKS

pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 2, reason="needs two NVIDIA GPUs")]
FLAGS = ("--max-lost-ranks", "1", "--num-redundant-experts", "32", "--max-num-seqs", "16", "--restart-lost-ranks")


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_and_the_rank_comes_back(how):
    import httpx

    from eprt.serve.running import RunningServer
    from tests.serve.conftest import MODEL
    from tests.serve.processes import wait_until
    from tests.serve.test_elastic import Burst

    with RunningServer(MODEL, 2, *FLAGS, "--device", "cuda", "--kv-cache-gb", "0.1", timeout_s=240) as server:

        def ranks() -> list[dict]:
            return httpx.get(f"{server.url}/v1/eprt/ranks").json()["ranks"]

        lengths = [len(choice[0]) for answer in Burst(server.url).wait() for choice in answer[:-1]]
        burst = Burst(server.url)
        lost = ranks()[1]
        os.kill(lost["pid"], how)
        moved = [len(choice[0]) for answer in burst.wait() for choice in answer[:-1]]
        assert moved == lengths
        wait_until(lambda: (new := ranks()[1])["state"] == "ready" and new["pid"] != lost["pid"], "the rank is back")
        again = [len(choice[0]) for answer in Burst(server.url).wait() for choice in answer[:-1]]
        assert again == lengths
