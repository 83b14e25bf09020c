"""Like launch.py, for WireGroup: plain processes that meet at an address, on one host or each in a host of its own.

A "host" of its own is a set of new namespaces (network, processes, mounts, System V memory, host name): its processes
have another /dev/shm, another /tmp and other interfaces than those of the next one, joined by a pair of virtual cards.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import pytest

from eprt import env
from tests.ranks.forked import ForkedRank
from tests.ranks.launch import PATIENCE, ROOT
from tests.ranks.launch_torch import finish

KEY = "only for tests"
# The shell stays: the first process of a namespace cannot be killed from inside.
# Fresh memory file systems lie over these, unless the checkout or its Python lies there.
_PRIVATE = [
    folder
    for folder in ("/dev/shm", "/tmp")
    if not any(Path(place).resolve().is_relative_to(folder) for place in (ROOT, sys.prefix))
]
ISOLATED = "".join(f"mount -t tmpfs none {folder} && " for folder in _PRIVATE)
ISOLATED += 'echo "$0" > /proc/sys/kernel/hostname && "$@"; exit $?'
UNSHARE = ["unshare", "--mount", "--ipc", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def start_wire_ranks(
    num_ranks: int,
    target: str,
    *,
    wire: str = "tcp",
    extra_env: dict[str, str] | None = None,
    meeting: str | None = None,
    hosts: Sequence[Sequence[str]] = ((),),
    **kwargs,
) -> Sequence[ForkedRank | subprocess.Popen[str]]:
    """Ranks that call target ("module:function") with (group, **kwargs): a process for each on this host, or one for
    all of each host. hosts: the command by which a program runs on each."""
    environment = {**env.without_mpi(), **PATIENCE, "EPRT_GROUP_KEY": KEY, **(extra_env or {})}
    place = meeting or f"127.0.0.1:{free_port()}"
    arguments = [target, json.dumps(kwargs), wire, place, str(num_ranks)]
    if len(hosts) == 1:
        return [ForkedRank(main, *arguments, str(rank), environment=environment) for rank in range(num_ranks)]
    per_host = num_ranks // len(hosts)
    command = [sys.executable, "-m", "tests.ranks.launch_wire", *arguments]
    return [
        subprocess.Popen(
            [*prefix, *command, ",".join(str(rank) for rank in range(i * per_host, (i + 1) * per_host))],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, prefix in enumerate(hosts)
    ]


def run_wire_ranks(num_ranks: int, target: str, *, timeout_s: float = 600, **options) -> list[str]:
    """What each rank, or host, printed."""
    results = finish(start_wire_ranks(num_ranks, target, **options), timeout_s)
    for rank, (status, output) in enumerate(results):
        assert status == 0, f"process {rank} of {target} ended with {status}:\n{output}"
    return [output for _, output in results]


def need_namespaces() -> None:
    """Skips the test where hosts cannot be made of namespaces."""
    if why := _why_no_namespaces():
        pytest.skip(f"no namespaces can be made here: {why}")


def _why_no_namespaces() -> str | None:
    trial = [*UNSHARE, "--net", "sh", "-c", ISOLATED, "trial"]
    try:
        done = subprocess.run([*trial, "ip", "link"], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else f"unshare: {done.stderr.strip()[:200]}"


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[list[str], list[list[str]]]]:
    """Addresses of two hosts, and for each the command that runs a program there."""
    name = f"eprt{os.getpid()}"
    spaces, cards = [f"{name}-{i}" for i in range(2)], [f"ep{os.getpid() % 1000000}x{i}" for i in range(2)]
    addresses = ["10.213.7.1", "10.213.7.2"]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)

    try:
        for space in spaces:
            ip("netns", "add", space)
        ip("link", "add", cards[0], "type", "veth", "peer", "name", cards[1])
        for space, card, address in zip(spaces, cards, addresses):
            ip("link", "set", card, "netns", space)
            ip("-n", space, "addr", "add", f"{address}/24", "dev", card)
            ip("-n", space, "link", "set", card, "up")
            ip("-n", space, "link", "set", "lo", "up")
        apart = [*UNSHARE, "sh", "-c", ISOLATED]
        yield addresses, [["ip", "netns", "exec", space, *apart, f"host-{i}"] for i, space in enumerate(spaces)]
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True, timeout=60)


def main(*given: str) -> None:
    *arguments, ranks = given
    if "," in ranks:
        command = [sys.executable, "-m", "tests.ranks.launch_wire", *arguments]
        processes = [subprocess.Popen([*command, rank]) for rank in ranks.split(",")]
        sys.exit(max(abs(process.wait()) for process in processes))
    target, kwargs, wire, meeting, num_ranks = arguments
    from eprt.ep.wire.wire_group import WireGroup

    try:
        group = WireGroup(meeting, int(ranks), int(num_ranks), wire=wire)
        module, function = target.split(":")
        getattr(import_module(module), function)(group, **json.loads(kwargs))
        group.close()
    except BaseException:  # a thread of the case may still run, and the others are to hear of it at once
        print(f"--- rank {ranks} ---\n{traceback.format_exc()}", flush=True)
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
