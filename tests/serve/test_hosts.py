"""A server on two hosts without MPI: answers, what it tells, moved experts, a drain, losses, and hosts that do not fit.

Hosts are namespaces, which share nothing but the checkout.
"""

import contextlib
import signal

import httpx
import psutil
import pytest

from eprt.serve.running import RunningServer
from tests.serve.conftest import MODEL, token_ids
from tests.serve.hosts import HostsServer
from tests.serve.processes import PATIENCE_S, PATIENT, listening, wait_until

SPREAD = ("--served-model-name", "demo", "--num-redundant-experts", "4", "--spare-experts", "4")
OBSERVED = ("--diagnose-window", "1", "--load-window", "0.5", "--rebalance", "dry-run")


@pytest.fixture
def start(hosts):
    """Makes servers, of which none outlives the test."""
    with contextlib.ExitStack() as stack:

        def make(port: int, *arguments: str, **options) -> HostsServer:
            made = HostsServer(hosts, port, *arguments, **options)
            stack.callback(made.close)
            return made

        yield make


def move_all_experts(http: httpx.Client) -> dict:
    """Every expert to another slot, most of them to another host; the state when it is done."""
    placement = http.get("/v1/eprt/placement").json()
    rows = [row[len(row) // 2 :] + row[: len(row) // 2] for row in placement["physical_to_logical_map"]]
    body = {"placement": {**placement, "physical_to_logical_map": rows, "slot_weight": None}}
    answer = http.post("/v1/eprt/rebalance", json=body)
    assert answer.status_code == 202, answer.text

    def moved() -> dict | None:
        state = http.get("/v1/eprt/rebalance").json()
        return None if state["migration"]["state"] in ("planning", "running") else state

    state = wait_until(moved, "moved experts")
    assert http.get("/v1/eprt/placement").json()["physical_to_logical_map"] == rows, state
    return state


def test_one_server_on_two_hosts(start, http):
    expected = token_ids(http)
    server = start(7931, *SPREAD, *OBSERVED)
    server.start_host(1)  # it waits for host 0
    server.start_host(0)
    url = server.wait_ready()

    def use() -> None:
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as there:
            assert token_ids(there) == expected
            ranks = there.get("/health").json()["ranks"]
            assert [rank["host"] for rank in ranks] == ["host-0", "host-0", "host-1", "host-1"]
            move_all_experts(there)
            assert token_ids(there) == expected
            metrics = there.get("/metrics").text
            assert 'eprt_migrations_total{outcome="done"} 1.0' in metrics
            assert 'eprt_migrated_experts_total{way="network"}' in metrics

            def window() -> dict:
                there.post("/v1/completions", json={"prompt": "Tell me", "max_tokens": 4})
                records = there.get("/v1/eprt/diagnose?since=-1").json()["records"]
                return next((one for one in records if one["rank"] == 3 and one["num_calls"]), {})

            record = wait_until(window, "a window with calls")
            decided = "eprt_rebalance_decisions_total{"
            wait_until(lambda: decided in there.get("/metrics").text, "a decision of the rebalancer")
            assert record["node_of_rank"] == [0, 0, 1, 1]
            assert record["process"]["host"] == "host-1"

    server.on_first_host(use)
    processes = server.processes()
    server.launcher_of(1).send_signal(signal.SIGTERM)
    assert server.wait_ended(processes) == [0, 0], [server.said(0), server.said(1)]


def test_virtual_nodes_of_one_launcher_over_a_paced_wire(http):
    """Without MPI; nothing listens but the HTTP port, once all ranks have met."""
    expected = token_ids(http)
    wire = ("--wire", "paced:gbps=5,latency_us=20", "--served-model-name", "demo")
    with RunningServer(MODEL, 2, *wire, variables={**PATIENT, "EPRT_RANKS_PER_NODE": "1"}) as server:
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as there:
            assert token_ids(there) == expected
        listeners = listening(psutil.Process(server.process.pid)).values()
        # The HTTP port, in launcher and frontend.
        assert [address for addresses in listeners for address in addresses] == ["127.0.0.1"] * 2
    assert server.process.returncode == 0


def test_a_killed_rank_ends_both_hosts_with_its_name(start):
    server = start(7932, "--served-model-name", "demo", num_ranks=1)
    for host in (0, 1):
        server.start_host(host)
    server.wait_ready()
    processes = server.processes()
    server.find("eprt.serve.ranks", "1").kill()
    assert server.wait_ended(processes) == [1, 1], [server.said(0), server.said(1)]
    for host in (0, 1):
        (line,) = [line for line in server.said(host).splitlines() if "was lost" in line]
        assert line.startswith("eprt: rank 1 (pid ") and "host host-1) was lost: its process is gone" in line
