"""The roll call: all hosts come to an address of host 0, and are compared, before anything is started.

Who does not fit is told why, and may come again mended; the others wait. Knows nothing of what is started then.
"""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from eprt.door import GREETING_S, Door
from eprt.ep.wire.meeting import connect, is_loopback, keep_alive, listen_for_ranks, parse_address
from eprt.handshake import Caller
from eprt.serve.errors import print_line
from eprt.serve.hosts.card import greeting, misfit, other_version
from eprt.serve.hosts.link import HostLink
from eprt.serve.hosts.messages import Begin, Ended, HostCard, ToFirstHost, ToOtherHost, TurnedAway
from eprt.serve.options import OptionError

_MAX_WARNINGS = 64
_LOOK_S = 0.2
_LATER_S = 5.0  # by which a host waits longer than host 0, so that host 0 tells who is missing


class HostStoppedError(Exception):
    """Told to stop while hosts were still awaited."""


@dataclass(frozen=True, slots=True)
class OtherHost:
    """A host that has come. Host 0 has one of each."""

    card: HostCard
    link: HostLink


def listen_for_hosts(address: str) -> socket.socket:
    """Host 0's end of --dist-init-addr. OptionError where it cannot be had."""
    host, port = parse_address(address)
    remedy = "name an address of this host, which is host 0, and a port that is free"
    try:
        listener = listen_for_ranks(host, port)
    except OSError as error:
        raise OptionError(
            f"--dist-init-addr {address}: cannot listen there: {error.strerror or error}; {remedy}"
        ) from None
    found = listener.getsockname()[0]
    if is_loopback(found) and not is_loopback(host):
        listener.close()
        raise OptionError(f"--dist-init-addr {address}: {host} is {found} here, which no other host reaches; {remedy}")
    return listener


class RollCall:
    """Host 0's side, from construction to wait().

    Args:
        listener: of listen_for_hosts.
        key: of the group.
        card: of host 0.
        wire: --wire.
    """

    def __init__(self, listener: socket.socket, key: str, card: HostCard, wire: str | None):
        self._card, self._wire = card, wire
        self._come: dict[int, OtherHost] = {}
        self._lock = threading.Lock()
        self._refused = ""  # the latest refusal
        self._warned: set[str] = set()  # refusals that were printed
        self._listener, self._key = listener, key.encode()

    def wait(self, timeout_s: float) -> list[OtherHost]:
        """The other hosts, in order. OptionError that names who has not come; those who have are told."""
        deadline_s = time.monotonic() + timeout_s
        door = Door(self._listener, self._key, self._welcome, self._warn_of_stranger)
        try:
            while missing := self._missing():
                if time.monotonic() > deadline_s:
                    raise OptionError(self._not_come(missing, timeout_s))
                time.sleep(_LOOK_S)
                self._forget_those_who_left()
        except OptionError as error:
            self._tell_all(TurnedAway(str(error)))
            raise
        except HostStoppedError:
            self._tell_all(Ended(0, f"{self._card} was told to stop before all hosts had come"))
            raise
        finally:
            door.close()
        return [self._come[node] for node in sorted(self._come)]

    def _missing(self) -> list[int]:
        with self._lock:
            return [node for node in range(1, self._card.nnodes) if node not in self._come]

    def _not_come(self, missing: list[int], timeout_s: float) -> str:
        names = ", ".join(map(str, missing))
        hosts = f"host {names} has" if len(missing) == 1 else f"hosts {names} have"
        refused = f" (refused: {self._refused})" if self._refused else ""
        return (
            f"{hosts} not come to --dist-init-addr within {timeout_s:g} s{refused}; give the same command there, with "
            "--node-rank of its own, or a longer --dist-timeout"
        )

    def _tell_all(self, message: TurnedAway | Ended) -> None:
        with self._lock:
            for host in self._come.values():
                host.link.send(message)

    def _forget_those_who_left(self) -> None:
        with self._lock:
            for node, host in list(self._come.items()):
                host.link.receive(0)
                if host.link.is_lost:
                    print_line(f"eprt: {host.card} has left again")
                    del self._come[node]

    def _welcome(self, caller: Caller) -> str | None:
        if refusal := other_version(caller.hello):
            return refusal
        sock = caller.accept()
        keep_alive(sock)
        link, deadline_s = HostLink(sock, ToFirstHost), time.monotonic() + GREETING_S
        messages = []
        while not messages and not link.is_lost and time.monotonic() < deadline_s:
            messages = link.receive(_LOOK_S)
        if messages and isinstance(messages[0], HostCard):
            self._judge(OtherHost(messages[0], link))
        else:
            link.close()
        return None

    def _warn_of_stranger(self, where: str, why: str) -> None:
        self._warn(f"a connection from {where}: {why}")

    def _judge(self, host: OtherHost) -> None:
        reason = misfit(self._card, host.card, self._wire)
        with self._lock:
            before = self._come.get(host.card.node)
            if reason is None and before is not None:
                reason = f"--node-rank {host.card.node} ({host.card.name}) is taken by {before.card}"
                reason += "; give each host a rank of its own"
            if reason is None:
                self._come[host.card.node] = host
        if reason is None:
            print_line(f"eprt: {host.card} has come")
            return
        self._warn(reason)
        host.link.send(TurnedAway(reason))
        host.link.close()

    def _warn(self, reason: str) -> None:
        self._refused = reason
        if reason not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(reason)
            print_line(f"eprt: refused: {reason}")


def come(address: str, key: str, card: HostCard, timeout_s: float) -> tuple[HostLink, Begin | Ended]:
    """Another host's side: the link to host 0, and what it says once all have come. OptionError says why not."""
    deadline_s = time.monotonic() + timeout_s
    try:
        sock = connect(parse_address(address), key.encode(), greeting(card), timeout_s)
    except ConnectionError as error:
        raise OptionError(f"--dist-init-addr {address}: {error}; is host 0 there, and waits?") from None
    link = HostLink(sock, ToOtherHost)
    link.send(card)
    print_line(f"eprt: {card} has come to {address} and waits for the other hosts")
    for message in _messages(link, deadline_s + _LATER_S):
        match message:
            case TurnedAway(reason):
                raise OptionError(reason)
            case Begin() | Ended():
                return link, message
    if link.is_lost:
        raise OptionError(f"--dist-init-addr {address}: host 0 has ended before all hosts had come; it says why")
    raise OptionError(f"--dist-init-addr {address}: not all hosts have come within {timeout_s:g} s; host 0 says who")


def _messages(link: HostLink, deadline_s: float) -> Iterator[object]:
    while not link.is_lost and time.monotonic() < deadline_s:
        yield from link.receive(_LOOK_S)
