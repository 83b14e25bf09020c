"""Meeting and its handshake: values of all ranks, refusals, and ranks that do not come or leave. Ranks are threads."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from eprt.ep.errors import EPTimeoutError, RankLostError
from eprt.ep.wire.meeting import Meeting, connect, parse_address
from eprt.handshake import MAGIC, HandshakeError, hear, introduce
from tests.ranks.launch_wire import free_port

PATIENCE_S = 100.0


def meet(ranks, size, key=b"k", address=None, timeout_s=PATIENCE_S) -> list[Any]:
    """Each rank's Meeting, or what it raised."""
    address = address or f"127.0.0.1:{free_port()}"

    def one(rank):
        try:
            return Meeting(address, rank, size, key, timeout_s)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def everyone(meetings, call):
    with ThreadPoolExecutor(len(meetings)) as pool:
        return list(pool.map(call, meetings))


def test_every_value_to_all_in_rank_order():
    meetings = meet(range(3), 3)
    for round_ in range(3):
        got = everyone(meetings, lambda m, r=round_: m.allgather("allgather", (m.rank, r, b"x" * 100_000 * r)))
        assert got == [[(rank, round_, b"x" * 100_000 * round_) for rank in range(3)]] * 3
    assert all(m.local_host == "127.0.0.1" for m in meetings)
    everyone(meetings, lambda m: m.close(PATIENCE_S))


def test_calls_that_differ_are_named():
    meetings = meet(range(2), 2)

    def call(m):
        with pytest.raises(RuntimeError, match="set-up call 0 is a on rank 0, b on rank 1; all ranks must"):
            m.allgather("ab"[m.rank], None)

    everyone(meetings, call)
    for m in meetings:
        m.close()


def test_a_rank_that_leaves_is_lost_to_those_who_wait_for_it():
    meetings = meet(range(3), 3)
    meetings[2].close()

    def call(m):
        with pytest.raises(RankLostError, match=rf"\[rank {m.rank}/3\] rank 2 died during set-up call 0"):
            m.allgather("allgather", None)
        with pytest.raises(RankLostError, match="rank 2 died during set-up"):
            m.allgather("allgather", None)

    everyone(meetings[:2], call)
    for m in meetings[:2]:
        m.close()


def test_rank_0_that_leaves_is_lost():
    meetings = meet(range(2), 2)
    meetings[0].close()
    with pytest.raises(RankLostError, match="rank 0 died"):
        meetings[1].allgather("allgather", None)
    meetings[1].close()


def test_ranks_that_are_late_for_a_set_up_call_are_named_at_the_configured_deadline(monkeypatch):
    """By everyone who waits, rank 0 or not; and whoever was late only finds all values there."""
    monkeypatch.setenv("EPRT_SET_UP_TIMEOUT_S", "0.3")
    meetings = meet(range(4), 4)
    everyone(meetings, lambda m: m.allgather("allgather", m.rank))

    def call(m):
        with pytest.raises(EPTimeoutError) as caught:
            m.allgather("window", m.rank)
        return str(caught.value), caught.value.peer, caught.value.others

    for rank, (text, peer, others) in zip((0, 2), everyone([meetings[0], meetings[2]], call)):
        assert text.startswith(f"[rank {rank}/4] waited 0."), text
        assert "s for ranks 1, 3 in set-up call 1 (window): epoch seen 1, expected 2; are they alive?" in text
        assert text.endswith("The deadline is EPRT_SET_UP_TIMEOUT_S") and (peer, others) == (1, (3,))
    for m in meetings:
        m.close()


def test_who_is_missing_is_forgotten_once_all_have_come():
    """The answer of the desk comes after the values; the next call gets its own."""
    meetings = meet(range(2), 2)
    first = everyone(meetings, lambda m: m.allgather("allgather", m.rank))
    meetings[1]._send(("who", 0))
    assert everyone(meetings, lambda m: m.allgather("allgather", m.rank + 5)) == [[5, 6]] * 2 and first == [[0, 1]] * 2
    everyone(meetings, lambda m: m.close(PATIENCE_S))


def test_ranks_that_do_not_come_are_named():
    got = meet([0, 1], 4, timeout_s=1.0)
    for rank, error in enumerate(got):
        assert isinstance(error, RuntimeError), error
        assert str(error) == f"[rank {rank}/4] ranks 2, 3 did not come to the meeting within 1 s"


def test_strangers_at_the_address_hold_up_nobody():
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(3) as pool, contextlib.ExitStack() as strangers:
        first = pool.submit(meet, [0], 3, address=address)
        for garbage in (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n") * 30:
            stranger = strangers.enter_context(socket.create_connection(_when_there(address)))
            with contextlib.suppress(OSError):  # some have been hung up again
                stranger.sendall(garbage)
        others = pool.submit(meet, [1, 2], 3, address=address)
        meetings = [*first.result(), *others.result()]
    assert everyone(meetings, lambda m: m.allgather("allgather", m.rank)) == [[0, 1, 2]] * 3
    everyone(meetings, lambda m: m.close(PATIENCE_S))


def _when_there(address: str) -> tuple[str, int]:
    """The address, once somebody listens there."""
    host, port = parse_address(address)
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), socket.create_connection((host, port)):
            break
        time.sleep(1e-3)
    return host, port


def test_nobody_at_the_address():
    port = free_port()
    with pytest.raises(ConnectionError, match=rf"cannot reach 127.0.0.1:{port} within 0.2 s: .*refused"):
        Meeting(f"127.0.0.1:{port}", 1, 2, b"", 0.2)


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ConnectionError, match=rf"\[rank 0/2\] cannot listen at the meeting address 127.0.0.1:{port}"
        ):
            Meeting(f"127.0.0.1:{port}", 0, 2, b"", 1.0)


def test_wrong_numbers_and_keys_are_refused():
    """While the right ranks still meet."""
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(Meeting, address, 0, 3, b"k", PATIENCE_S)
        place = parse_address(address)
        admitted = connect(place, b"k", {"rank": 1, "size": 3}, PATIENCE_S)
        for key, hello, words in (
            (b"other", {"rank": 2, "size": 3}, "refuses: another key; give all ranks the same EPRT_GROUP_KEY"),
            (b"k", {"rank": 2, "size": 2}, "refuses: rank 2 says that there are 2 ranks, rank 0 says 3"),
            (b"k", {"rank": 3, "size": 3}, "refuses: rank 3 is not one of 0 to 2"),
            (b"k", {"rank": 1, "size": 3}, "refuses: there is a rank 1 already"),
        ):
            with pytest.raises(ConnectionError) as caught:
                connect(place, key, hello, PATIENCE_S)
            assert words in str(caught.value)
        third = Meeting(address, 2, 3, b"k", PATIENCE_S)
        first.result().close()
        third.close()
        admitted.close()


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:70000", "host:http"])
def test_bad_addresses(text):
    with pytest.raises(ValueError, match="write HOST:PORT"):
        parse_address(text)


def test_addresses():
    assert parse_address("10.0.0.1:7000") == ("10.0.0.1", 7000)
    assert parse_address("[::1]:7000") == ("::1", 7000)


def test_a_listener_without_the_key_is_found_out():
    """It knows the protocol, but cannot prove the key; and one that speaks something else."""
    for answers, words in ((True, "whoever listens there has another key"), (False, "is no rank of eprt")):
        near, far = socket.socketpair()

        def listen(sock=far, answers=answers):
            sock.sendall(MAGIC + b"n" * 32 if answers else b"HTTP/1.1 400 Bad Request\r\n" + b"x" * 64)
            with contextlib.suppress(ConnectionError):  # the caller has left at the first word
                sock.recv(4096)
                sock.sendall(b"\0\0\0\0" + b"p" * 32)

        other = threading.Thread(target=listen)
        other.start()
        with pytest.raises(HandshakeError, match=words):
            introduce(near, b"k", {"rank": 1}, time.monotonic() + PATIENCE_S)
        near.close()
        other.join()
        far.close()


def test_garbage_is_not_admitted():
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, b"\x02\0\0\0{}" + b"n" * 32 + b"p" * 32):
        near, far = socket.socketpair()
        near.sendall(garbage)
        near.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            hear(far, b"k", time.monotonic() + PATIENCE_S)
        near.close()
        far.close()
