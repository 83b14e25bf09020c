"""Which processes share this host, and which of them have died.

Knows pids only; group.py maps them to ranks. A pidfd tells of a death at once, also of a zombie that nobody has reaped
yet, and cannot be fooled by a pid used again.
"""

import os
import select
import threading


def process_domain() -> str:
    """Equal for two processes that see each other's pids (same boot, same pid namespace), else different."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = file.read().strip()
    return f"{boot_id}/{os.readlink('/proc/self/ns/pid')}"


def _exited(pid: int) -> bool:
    """Without pidfd (Linux before 5.3): gone, or a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True


class LossOrder:
    """Which of the ranks that are lost was noticed first. Of several that one look finds the lowest comes first."""

    def __init__(self):
        self._looking = threading.Lock()  # for threads that ask at once
        self._noticed: dict[int, None] = {}

    def in_order(self, lost: set[int]) -> tuple[int, ...]:
        """lost: all that are so now. One that is not among them any more counts anew."""
        with self._looking:
            kept = dict.fromkeys(rank for rank in self._noticed if rank in lost)
            self._noticed = kept | dict.fromkeys(sorted(lost - kept.keys()))
            return tuple(self._noticed)


class PeerWatch:
    """Watches processes of this host. pid_of_rank: rank -> pid, as the process domain numbers them."""

    def __init__(self, pid_of_rank: dict[int, int]):
        self._looking = threading.Lock()  # for threads that ask at once
        self._lost: set[int] = set()
        self._watched: dict[int, int] = {}  # rank -> pid, all of them
        self._rank_of_fd: dict[int, int] = {}
        self._pid_of_rank: dict[int, int] = {}  # those without a pidfd
        self._poll = select.poll()
        for rank, pid in pid_of_rank.items():
            self.watch(rank, pid)

    def watch(self, rank: int, pid: int) -> None:
        """From now on the rank is this process; nothing changes where it is already."""
        if self._watched.get(rank) == pid:
            return
        with self._looking:
            self._forget(rank)
            self._watched[rank] = pid
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._lost.add(rank)
            except OSError:
                self._pid_of_rank[rank] = pid
            else:
                self._rank_of_fd[fd] = rank
                self._poll.register(fd, select.POLLIN)

    def _forget(self, rank: int) -> None:
        self._lost.discard(rank)
        self._pid_of_rank.pop(rank, None)
        for fd in [fd for fd, watched in self._rank_of_fd.items() if watched == rank]:
            self._close(fd)

    def _close(self, fd: int) -> None:
        self._poll.unregister(fd)
        del self._rank_of_fd[fd]
        os.close(fd)

    def lost(self) -> tuple[int, ...]:
        """Ranks whose process has ended, in order. Costs one system call."""
        with self._looking:
            for fd, _ in self._poll.poll(0):
                self._lost.add(self._rank_of_fd[fd])
                self._close(fd)
            self._lost.update(rank for rank, pid in self._pid_of_rank.items() if _exited(pid))
            return tuple(sorted(self._lost))

    def close(self) -> None:
        for fd in list(self._rank_of_fd):
            self._close(fd)
        self._pid_of_rank.clear()
