"""Which processes share this host, and which of them have died.

Knows pids only; group.py maps them to ranks. A pidfd tells of a death at once, also of a zombie that nobody has reaped
yet, and cannot be fooled by a pid used again.
"""

import os
import select


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


class PeerWatch:
    """Watches processes of this host. pid_of_rank: rank -> pid, as the process domain numbers them."""

    def __init__(self, pid_of_rank: dict[int, int]):
        self._lost: set[int] = set()
        self._rank_of_fd: dict[int, int] = {}
        self._pid_of_rank: dict[int, int] = {}  # those without a pidfd
        self._poll = select.poll()
        for rank, pid in pid_of_rank.items():
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._lost.add(rank)
            except OSError:
                self._pid_of_rank[rank] = pid
            else:
                self._rank_of_fd[fd] = rank
                self._poll.register(fd, select.POLLIN)

    def lost(self) -> tuple[int, ...]:
        """Ranks whose process has ended, in order. Costs one system call."""
        for fd, _ in self._poll.poll(0):
            self._poll.unregister(fd)
            self._lost.add(self._rank_of_fd.pop(fd))
            os.close(fd)
        self._lost.update(rank for rank, pid in self._pid_of_rank.items() if _exited(pid))
        return tuple(sorted(self._lost))

    def close(self) -> None:
        for fd in self._rank_of_fd:
            self._poll.unregister(fd)
            os.close(fd)
        self._rank_of_fd.clear()
        self._pid_of_rank.clear()
