"""A rank's channel: nothing blocks the engine, signals and lost processes wake it; and the HTTP port."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from eprt.serve.options import OptionError
from eprt.serve.ranks import channel as channel_module
from eprt.serve.ranks.channel import Channel, FrontendLostError, bind_http, connect, listen
from eprt.serve.ranks.messages import BrokenInvariant, Drain, Hello, Refused, Stop, ToFrontend, Unpacker, Wake, pack

HELLO = Hello("secret", 0, 1, "host")


@pytest.fixture
def ends():
    """A channel, and the frontend's end of its connection."""
    mine, frontends = socket.socketpair()
    with mine, frontends:
        frontends.settimeout(100)
        yield Channel(mine, HELLO), frontends


def received(frontends: socket.socket, count: int) -> list:
    unpacker, messages = Unpacker(ToFrontend), []
    while len(messages) < count:
        messages += unpacker.add_bytes(frontends.recv(1 << 16))
    return messages


@pytest.mark.parametrize("hosts, kind", [({"a"}, "unix"), ({"a", "b"}, "tcp")])
def test_ranks_connect_inside_a_host_and_between_hosts(hosts, kind, monkeypatch):
    monkeypatch.setattr(channel_module.socket, "gethostname", lambda: "127.0.0.1")
    listener, endpoint = listen(hosts)
    with listener, connect(endpoint, timeout_s=100) as sock:
        accepted, _ = listener.accept()
        with accepted:
            Channel(sock, HELLO).send(Drain("x"))
            assert endpoint.startswith(f"{kind}:") and received(accepted, 2) == [HELLO, Drain("x")]


def test_a_frontend_that_cannot_be_reached_is_named():
    with pytest.raises(ConnectionError, match=r"cannot reach the frontend at unix:eprt-nobody within 0 s"):
        connect("unix:eprt-nobody", timeout_s=0)


def test_messages_arrive_whole_and_in_order(ends):
    channel, frontends = ends
    data = pack(Wake(1)) + pack(Wake(2)) + pack(Stop(3))
    frontends.sendall(data[:-3])
    assert channel.receive(None) == [Wake(1), Wake(2)]
    assert channel.receive(0) == []
    frontends.sendall(data[-3:])
    assert channel.receive(None) == [Stop(3)]


def test_what_the_socket_does_not_take_waits_and_comes_later(ends):
    channel, frontends = ends
    large = BrokenInvariant("x" * (1 << 20))
    for _ in range(4):
        channel.send(large)  # more than the socket's buffers hold, and nobody reads
    unpacker, messages = Unpacker(ToFrontend), []
    while len(messages) < 5:
        channel.receive(0)
        messages += unpacker.add_bytes(frontends.recv(1 << 16))
    assert messages == [HELLO, *[large] * 4]
    assert channel.send_rest(timeout_s=100)


def test_what_is_not_taken_in_time_is_told(ends):
    channel, frontends = ends
    channel.send(BrokenInvariant("x" * (1 << 24)))
    assert not channel.send_rest(timeout_s=0) and not channel.wait_closed(timeout_s=0)
    frontends.close()
    assert channel.wait_closed(timeout_s=100) and not channel.send_rest(timeout_s=100)


def test_a_frontend_that_is_gone_is_an_error(ends):
    channel, frontends = ends
    frontends.close()
    with pytest.raises(FrontendLostError):
        channel.receive(None)
    with pytest.raises(FrontendLostError):
        channel.send(Drain("x"))


def test_a_signal_wakes_a_sleeping_rank_and_its_name_is_kept(ends):
    channel, _ = ends
    before = signal.getsignal(signal.SIGUSR1)
    try:
        channel.catch_signals((signal.SIGUSR1,))
        os.kill(os.getpid(), signal.SIGUSR1)
        assert channel.receive(None) == [] and channel.stop_reasons == ["SIGUSR1"]
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, before)


def test_the_end_of_mpirun_or_of_the_launcher_wakes_a_rank_once(ends, monkeypatch):
    channel, _ = ends
    sleeper = [sys.executable, "-c", "input()"]
    with (
        subprocess.Popen(sleeper, stdin=subprocess.PIPE) as mpirun,
        subprocess.Popen(sleeper, stdin=subprocess.PIPE) as launcher,
    ):
        monkeypatch.setattr(channel_module.os, "getppid", lambda: mpirun.pid)
        monkeypatch.setattr(channel_module, "parent_of", lambda pid: launcher.pid)
        monkeypatch.setenv("EPRT_LAUNCHER_PID", str(launcher.pid))
        channel.watch_starters(mpirun.pid)
        launcher.kill()
        channel.receive(None)
        mpirun.kill()
        mpirun.wait()
        channel.receive(0)
    assert channel.stop_reasons == [f"the launcher (pid {launcher.pid}) is gone"]


def test_a_launcher_elsewhere_is_not_watched(ends, monkeypatch):
    channel, _ = ends
    monkeypatch.setenv("EPRT_LAUNCHER_PID", str(os.getpid()))
    channel.watch_starters(os.getppid())  # this process is not its parent's parent
    assert list(channel._watched.values()) == [f"mpirun (pid {os.getppid()}) is gone"]


def test_an_mpirun_that_went_before_it_was_watched_is_noticed(ends):
    channel, _ = ends
    with subprocess.Popen([sys.executable, "-c", ""]) as mpirun:
        mpirun.wait()
    channel.watch_starters(mpirun.pid)
    assert channel.stop_reasons == [f"mpirun (pid {mpirun.pid}) is gone"]


def test_an_address_that_is_taken_is_said_once_with_a_remedy():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OptionError) as error:
            bind_http("127.0.0.1", port)
    told = f"cannot listen on 127.0.0.1:{port}: Address already in use; --port takes another, 0 any free one"
    assert str(error.value) == told
    with pytest.raises(OptionError, match=r"cannot listen on no\.such\.host\.invalid:0: [^;]+$"):
        bind_http("no.such.host.invalid", 0)


def test_a_waker_wakes_a_sleeping_rank_from_another_thread_once(ends):
    channel, frontends = ends
    wake = channel.add_waker()
    threading.Timer(0.05, wake).start()
    assert channel.receive(None) == [] and channel.was_woken
    wake()
    wake()
    assert channel.receive(0) == [] and channel.was_woken
    assert channel.receive(0) == [] and not channel.was_woken
    frontends.sendall(pack(Wake(1)))
    wake()
    assert channel.receive(None) == [Wake(1)] and channel.was_woken


def test_the_last_words_of_a_frontend_that_closes_come_before_its_end(ends):
    channel, frontends = ends
    frontends.sendall(pack(Refused("slot 1 is taken")))
    frontends.close()
    assert channel.receive(None) == [Refused("slot 1 is taken")]
    with pytest.raises(FrontendLostError):
        channel.receive(None)
