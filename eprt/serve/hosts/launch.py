"""Launchers of ranks that meet over the wire: of host 0, of the other hosts, or of one host that does as if.

Knows nothing of what the ranks do.
"""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

from eprt import env
from eprt.ep.wire.meeting import listen_for_ranks, parse_address
from eprt.serve.errors import print_line
from eprt.serve.hosts.card import host_card
from eprt.serve.hosts.guest import GuestLauncher
from eprt.serve.hosts.link import run_secret
from eprt.serve.hosts.linked_hosts import LinkedHosts
from eprt.serve.hosts.messages import Begin, Ended
from eprt.serve.hosts.roll_call import HostStoppedError, RollCall, come, listen_for_hosts
from eprt.serve.options import RankConfig, ServeOptions, WireJoin
from eprt.serve.ranks.caught_signals import STOPS
from eprt.serve.ranks.channel import listen, listen_at
from eprt.serve.ranks.host_launch import HostLauncher, RunPlace, prepared_http
from eprt.serve.ranks.other_hosts import OtherHosts

_LOOPBACK = "127.0.0.1"


def launch(options: ServeOptions) -> int:
    """Serves until told to stop; returns the exit status. OptionError for what is wrong before anything is started."""
    if options.nnodes == 1:
        return _launch_one_host(options)
    key = env.get("EPRT_GROUP_KEY") or ""
    try:
        return _launch_first_host(options, key) if options.node_rank == 0 else _launch_other_host(options, key)
    except HostStoppedError:
        print_line("eprt: told to stop before all hosts had come")
        return 0


def _launch_one_host(options: ServeOptions) -> int:
    with prepared_http(options) as (keys, http):
        place = _wire_place(_LOOPBACK, listen({socket.gethostname()}), os.urandom(32).hex(), os.urandom(16).hex())
        return HostLauncher(options, keys, http, place, OtherHosts()).run()


def _wire_place(host: str, frontend: tuple[socket.socket, str], key: str, token: str) -> RunPlace:
    """host: address where rank 0 listens. frontend: listening socket and endpoint."""
    meeting = listen_for_ranks(host, 0)
    wire = WireJoin(_address(host, meeting.getsockname()[1]), key, meeting.fileno())
    return RunPlace(*frontend, token, None, wire, meeting)


def _address(host: str, port: int) -> str:
    return f"{host}:{port}"


def _launch_first_host(options: ServeOptions, key: str) -> int:
    assert options.dist_init_addr is not None, "several hosts have an address"
    host, _ = parse_address(options.dist_init_addr)
    with prepared_http(options) as (keys, http):
        with _stopped_by_signals():
            listener = listen_for_hosts(options.dist_init_addr)
            card = host_card(options, key)
            roll_call = RollCall(listener, key, card, options.wire)
            print_line(f"eprt: {card} waits for {options.nnodes - 1} more at {options.dist_init_addr}")
            hosts = roll_call.wait(options.dist_timeout_s)
        nonce = os.urandom(32)
        ranks, port = listen_at(host)
        token = run_secret(key, nonce, b"frontend")
        place = _wire_place(host, (ranks, f"tcp:{_address(host, port)}"), run_secret(key, nonce, b"ranks"), token)
        assert place.meeting is not None, "it has just been made"
        for other in hosts:
            other.link.send(Begin(nonce, place.meeting.getsockname()[1], port))
        return HostLauncher(options, keys, http, place, LinkedHosts(hosts)).run()


def _launch_other_host(options: ServeOptions, key: str) -> int:
    assert options.dist_init_addr is not None, "several hosts have an address"
    host, _ = parse_address(options.dist_init_addr)
    with _stopped_by_signals():
        link, begin = come(options.dist_init_addr, key, host_card(options, key), options.dist_timeout_s)
    if isinstance(begin, Ended):
        print_line(f"eprt: {begin.reason}")
        return begin.status
    config = RankConfig(
        options,
        0,
        options.total_ranks,
        None,
        f"tcp:{_address(host, begin.frontend_port)}",
        run_secret(key, begin.nonce, b"frontend"),
        os.getpid(),
        variables=env.eprt_variables(),
        wire=WireJoin(_address(host, begin.meeting_port), run_secret(key, begin.nonce, b"ranks")),
    )
    return GuestLauncher(config, link).run()


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Within the block a signal raises HostStoppedError: nothing has been started."""

    def stop(number: int, frame) -> None:
        raise HostStoppedError

    before = {number: signal.signal(number, stop) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
