"""Hosts that come, do not come, do not fit, or leave again; each is a thread."""

import contextlib
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from eprt.serve.hosts import roll_call
from eprt.serve.hosts.messages import Begin, Ended
from eprt.serve.hosts.roll_call import HostStoppedError, RollCall, come, listen_for_hosts
from eprt.serve.options import OptionError
from tests.ranks.launch_wire import free_port
from tests.unit.serve.hosts.cases import CARD, card

PATIENCE_S = 100.0


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def hosts():
    """Where other hosts run."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


def called(address: str, key: str = "k", first=CARD) -> RollCall:
    return RollCall(listen_for_hosts(address), key, first, None)


def test_all_come_in_any_order(address, hosts):
    coming = [hosts.submit(come, address, "k", card(node=node, name=f"h{node}"), PATIENCE_S) for node in (2, 1)]
    found = called(address).wait(PATIENCE_S)
    assert [host.card.name for host in found] == ["h1", "h2"]
    for host in found:
        host.link.send(Begin(b"n", 1, 2))
    assert [one.result()[1] for one in coming] == [Begin(b"n", 1, 2)] * 2


def test_who_does_not_fit_is_told_and_may_come_again(address, hosts, capfd):
    first = called(address, first=card(node=0, name="a", nnodes=2))
    done: Future = hosts.submit(first.wait, PATIENCE_S)
    for changes, why in (
        ({"num_ranks": 1}, r"host 1 \(b\) has -n 1, host 0 \(a\) has -n 2; start equally many"),
        ({"node": 0}, r"--node-rank 0 \(b\) is taken by host 0 \(a\)"),
    ):
        with pytest.raises(OptionError, match=why):
            come(address, "k", card(**{"nnodes": 2, **changes}), PATIENCE_S)
    with pytest.raises(OptionError, match="another key; give all ranks the same EPRT_GROUP_KEY"):
        come(address, "other", card(nnodes=2), PATIENCE_S)
    right = hosts.submit(come, address, "k", card(nnodes=2), PATIENCE_S)
    (host,) = done.result()
    host.link.send(Ended(0, "enough"))
    assert right.result()[1] == Ended(0, "enough")
    said = capfd.readouterr().err
    assert "eprt: refused: host 1 (b) has -n 1, host 0 (a) has -n 2" in said
    assert "eprt: refused: a connection from 127.0.0.1: another key" in said and "eprt: host 1 (b) has come\n" in said


def test_a_node_rank_that_is_given_twice(address, hosts):
    done = hosts.submit(called(address).wait, PATIENCE_S)
    coming = [hosts.submit(come, address, "k", card(name=name), PATIENCE_S) for name in ("b", "c")]
    (twice,) = [str(one.exception()) for one in _first_done(coming)]
    assert "--node-rank 1 (" in twice and "is taken by host 1 (" in twice and "give each host a rank" in twice
    third = hosts.submit(come, address, "k", card(node=2), PATIENCE_S)
    for host in done.result():
        host.link.send(Ended(0, ""))
    third.result()


def _first_done(coming: list[Future]) -> list[Future]:
    one = threading.Event()
    for each in coming:
        each.add_done_callback(lambda _: one.set())
    assert one.wait(PATIENCE_S)
    return [each for each in coming if each.done()]


def test_a_host_that_never_comes_is_named_to_all(address, hosts, monkeypatch):
    there = hosts.submit(come, address, "k", card(node=2), 100 * PATIENCE_S)
    first = called(address)

    def now() -> float:
        """The time is over as soon as host 2 is there."""
        return time.monotonic() + 2 * PATIENCE_S * (2 in first._come)

    monkeypatch.setattr(roll_call, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    why = r"host 1 has not come to --dist-init-addr within 100 s; give the same command there, with --node-rank"
    with pytest.raises(OptionError, match=why):
        first.wait(PATIENCE_S)
    with pytest.raises(OptionError, match=why):
        there.result()


def test_a_stopped_call_is_told_to_those_who_wait(address, hosts, monkeypatch):
    there = hosts.submit(come, address, "k", card(), PATIENCE_S)
    first = called(address)

    def stop(_: float) -> None:
        if 1 in first._come:
            raise HostStoppedError

    monkeypatch.setattr(roll_call.time, "sleep", stop)
    with pytest.raises(HostStoppedError):
        first.wait(PATIENCE_S)
    assert there.result()[1] == Ended(0, "host 0 (a) was told to stop before all hosts had come")


def test_a_host_that_leaves_again_makes_room(address, hosts, capfd):
    first = called(address)
    done = hosts.submit(first.wait, PATIENCE_S)
    with contextlib.closing(_raw_host(address, card(name="gone"))):
        while 1 not in first._come:
            time.sleep(1e-3)
    while 1 in first._come:
        time.sleep(1e-3)
    assert "eprt: host 1 (gone) has left again\n" in capfd.readouterr().err
    coming = [hosts.submit(come, address, "k", card(node=node, name="back"), PATIENCE_S) for node in (1, 2)]
    for host in done.result():
        assert host.card.name == "back"
        host.link.send(Ended(0, ""))
    assert [one.result()[1] for one in coming] == [Ended(0, "")] * 2


def _raw_host(address: str, shown) -> socket.socket:
    """A host that has shown its card, and does nothing more."""
    from eprt.ep.wire.meeting import connect, parse_address
    from eprt.serve.hosts.card import greeting
    from eprt.serve.ranks.messages import pack

    sock = connect(parse_address(address), b"k", greeting(shown), PATIENCE_S)
    sock.sendall(pack(shown))
    return sock


def test_addresses_that_cannot_be_had(address):
    with (
        listen_for_hosts(address),
        pytest.raises(OptionError, match=rf"{address}: cannot listen there: .*; name an ad"),
    ):
        listen_for_hosts(address)
    with pytest.raises(OptionError, match=r"--dist-init-addr 192\.0\.2\.1:1: cannot listen there"):
        listen_for_hosts("192.0.2.1:1")


def test_a_name_that_is_only_this_host_to_itself(monkeypatch, address):
    _, _, port = address.rpartition(":")
    real = roll_call.listen_for_ranks
    monkeypatch.setattr(roll_call, "listen_for_ranks", lambda host, port: real("127.0.0.1", port))
    with pytest.raises(OptionError, match=f"node0:{port}: node0 is 127.0.0.1 here, which no other host reaches"):
        listen_for_hosts(f"node0:{port}")


def test_nobody_is_there(address):
    with pytest.raises(OptionError, match=rf"{address}: cannot reach {address} within 0.2 s: .* is host 0 there"):
        come(address, "k", card(), 0.2)
