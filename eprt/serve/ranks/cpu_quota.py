"""CpuQuota and RunQueue: how often this process was kept from its cores, by a cgroup's quota or by other processes.

Linux counts both. A process may be put into another cgroup while it runs: what that one had counted before is not its
own. Knows nothing of ranks.
"""

import contextlib
import os
import threading
from pathlib import Path

_CGROUP = Path("/proc/self/cgroup")
_MOUNTS = Path("/proc/self/mountinfo")


class CpuQuota:
    """Of this process's cgroup and those above, the one that was throttled longest. Files of /proc can be given."""

    def __init__(self, cgroup: Path = _CGROUP, mounts: Path = _MOUNTS):
        self._cgroup, self._mounts = cgroup, mounts
        self._where = ""  # the text of /proc/self/cgroup
        self._files: list[Path] = []
        self._before: dict[Path, tuple[int, int]] = {}
        self._periods = self._throttled_ns = 0

    def totals(self) -> tuple[int, float] | None:
        """Throttled periods and microseconds since the first call; None where no cgroup counts them."""
        with contextlib.suppress(OSError):
            self._look()
        return (self._periods, self._throttled_ns / 1e3) if self._files else None

    def _look(self) -> None:
        where = self._cgroup.read_text()
        if where != self._where:
            self._where, self._before = where, {}
            self._files = stat_files(where, self._mounts.read_text())
        now = {path: _throttled(path.read_text()) for path in self._files}
        more = [
            (num - self._before[path][0], ns - self._before[path][1])
            for path, (num, ns) in now.items()
            if path in self._before
        ]
        periods, throttled_ns = max(more, key=lambda each: each[1], default=(0, 0))
        self._periods += periods
        self._throttled_ns += throttled_ns
        self._before = now


def stat_files(cgroup: str, mounts: str) -> list[Path]:
    """cpu.stat of the process's cgroup and of those above it, as far as they are visible. The texts are those of
    /proc/self/cgroup and /proc/self/mountinfo; version 1 and 2."""
    path_of = {}  # by controllers; "" for version 2
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        path_of.update(dict.fromkeys(controllers.split(","), path))
    files: list[Path] = []
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        root, point = fields.split()[3:5]
        kind, _, options = rest.split()[:3]
        path = path_of.get("") if kind == "cgroup2" else path_of.get("cpu")
        if path is None or not (kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(","))):
            continue
        inside = path.removeprefix(root.rstrip("/")) if path.startswith(root.rstrip("/")) else path
        folder = Path(point) / inside.lstrip("/")
        for each in (folder, *folder.parents):
            if (each / "cpu.stat").exists() and each / "cpu.stat" not in files:
                files.append(each / "cpu.stat")
            if each == Path(point):
                break
    return [path for path in files if _counts_throttling(path)]


def _counts_throttling(path: Path) -> bool:
    try:
        return "nr_throttled" in path.read_text()
    except OSError:
        return False


def _throttled(text: str) -> tuple[int, int]:
    """Periods, nanoseconds."""
    counts = dict(line.split(None, 1) for line in text.splitlines() if " " in line)
    ns = int(counts["throttled_usec"]) * 1000 if "throttled_usec" in counts else int(counts.get("throttled_time", 0))
    return int(counts.get("nr_throttled", 0)), ns


class RunQueue:
    """Of the thread that makes it. folder: of /proc, with a file schedstat."""

    def __init__(self, folder: Path | None = None):
        self._path = (folder or Path(f"/proc/self/task/{threading.get_native_id()}")) / "schedstat"

    def waited_us(self) -> float | None:
        """Time in which the thread was ready to run and had no core; None where the kernel does not count it."""
        try:
            cpu_ns, waited_ns, _ = map(int, os.fsdecode(self._path.read_bytes()).split())
        except (OSError, ValueError):
            return None
        return waited_ns / 1e3 if cpu_ns or waited_ns else None
