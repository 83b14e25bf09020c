"""The planner with real processes: a decode instance comes when the others' rows are taken, and goes again."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx

from eprt.serve.running import RunningServer
from tests.serve.processes import PATIENCE_S, wait_until
from tests.serve.test_instances import document
from tests.unit.cases import MODEL

FLAGS = ("--prefill", "0", "--decode", "1", "--max-num-seqs", "2", "--scale", "auto", "--scale-decode", "1:2")
FLAGS += ("--scale-prefill", "0:0", "--scale-target", "100,10", "--scale-window", "0.5", "--scale-cooldown", "1")


def ready(server: RunningServer) -> list[str]:
    return [one["name"] for one in document(server)["instances"] if one["state"] == "ready"]


def test_decode_instances_come_with_the_load_and_go_with_it():
    with RunningServer(MODEL, 0, *FLAGS, timeout_s=2 * PATIENCE_S) as server, ThreadPoolExecutor(4) as pool:
        enough = threading.Event()

        def ask(number: int) -> set[int]:
            """Statuses of requests that follow each other for as long as the load lasts."""
            statuses = set()
            body = {"model": server.model, "prompt": [5 + number] * 9, "max_tokens": 200, "ignore_eos": True}
            # One client: making one takes long enough on a crowded machine for the server to find itself idle.
            with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
                while not enough.is_set():
                    statuses.add(http.post("/v1/completions", json=body).status_code)
            return statuses

        asking = [pool.submit(ask, number) for number in range(4)]
        try:
            wait_until(lambda: ready(server) == ["decode-0", "decode-1"], "a second instance")
            scale = document(server)["scale"]["roles"]["decode"]
            assert (scale["started"], scale["retired"], scale["most"]) == (1, 0, 2)
            second = wait_until(lambda: document(server)["instances"][1]["sequences"] > 0, "requests of its own")
            assert second
        finally:
            enough.set()
        assert [each.result() for each in asking] == [{200}] * 4
        wait_until(lambda: ready(server) == ["decode-0"], "one instance")
        assert document(server)["scale"]["roles"]["decode"]["retired"] == 1
