"""A second host made of namespaces: it shares the files of this one, but no memory, no processes and no address."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tests.ranks.launch_wire import ISOLATED, UNSHARE
from tests.serve.processes import wait_until

# Exits with 0 if the host of argv[1] answers at all: nobody listens at port 9, which the host itself says.
_REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=1)
except ConnectionRefusedError:
    pass
"""


@dataclass(frozen=True)
class OtherHost:
    here: str  # the address of this host, as the other one sees it
    there: str
    command: tuple[str, ...]  # before that of a program which is to run there

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Nothing comes through within the block, and nobody is told.

        Behind it everything does again: the other host remembers for some seconds that nobody answered, and whatever
        it sends meanwhile ends with "no route to host".
        """
        card = f"eh{os.getpid() % 1000000}x0"
        _ip("link", "set", card, "down")
        try:
            yield
        finally:
            _ip("link", "set", card, "up")
            wait_until(self._reaches_here, "the other host reaches this one again")

    def _reaches_here(self) -> bool:
        command = [*self.command, sys.executable, "-S", "-c", _REACH, self.here]
        return not subprocess.run(command, check=False, capture_output=True, timeout=60).returncode


@contextlib.contextmanager
def other_host() -> Iterator[OtherHost]:
    space, number = f"eprt-host{os.getpid()}", os.getpid() % 1000000
    cards, net = [f"eh{number}x{i}" for i in range(2)], f"10.213.{8 + number % 240}"  # this machine has it, not a space
    here, there = f"{net}.1", f"{net}.2"
    try:
        _ip("netns", "add", space)
        _ip("link", "add", cards[0], "type", "veth", "peer", "name", cards[1], "netns", space)
        _ip("addr", "add", f"{here}/24", "dev", cards[0])
        _ip("link", "set", cards[0], "up")
        _ip("-n", space, "addr", "add", f"{there}/24", "dev", cards[1])
        _ip("-n", space, "link", "set", cards[1], "up")
        _ip("-n", space, "link", "set", "lo", "up")
        yield OtherHost(here, there, ("ip", "netns", "exec", space, *UNSHARE, "sh", "-c", ISOLATED, "elsewhere"))
    finally:
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True, timeout=60)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)
