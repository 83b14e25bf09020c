"""Which CPUs this process may use, and how they form cores and NUMA nodes. Read from /sys; standard library only."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Cpu:
    """One hardware thread. Sorts by node, core, id."""

    node: int
    core: int  # smallest id among the hardware threads of its core
    id: int


@dataclass(frozen=True)
class CpuTopology:
    """The hardware threads that may be used. A machine that reports no NUMA nodes counts as one node; where it reports
    no cores, each hardware thread is one."""

    cpus: tuple[Cpu, ...]  # sorted
    quota: float | None = None  # CPU time that the container may use, in CPUs; None: unlimited

    def __post_init__(self):
        if not self.cpus:
            raise ValueError("a topology needs at least one CPU")

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({cpu.node for cpu in self.cpus}))

    @property
    def num_cores(self) -> int:
        return len({cpu.core for cpu in self.cpus})

    def restricted_to(self, cpu_ids: Iterable[int]) -> "CpuTopology":
        """Only the CPUs in cpu_ids. ValueError when none of them is online."""
        wanted = set(cpu_ids)
        kept = tuple(cpu for cpu in self.cpus if cpu.id in wanted)
        if not kept:
            have = format_cpus(cpu.id for cpu in self.cpus)
            raise ValueError(f"none of the CPUs {format_cpus(wanted) or '(none)'} is online; online are {have}")
        return CpuTopology(kept, self.quota)


def read_topology(sys_root: str | Path = "/sys", proc_root: str | Path = "/proc") -> CpuTopology:
    """All online CPUs of this machine."""
    system = Path(sys_root) / "devices/system"
    online = parse_cpus(_text(system / "cpu/online") or "") or sorted(os.sched_getaffinity(0))
    node_of_cpu = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for cpu in parse_cpus(_text(folder / "cpulist") or "")
    }
    cpus = []
    for cpu in online:
        topology = system / f"cpu/cpu{cpu}/topology"
        siblings = _text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list") or str(cpu)
        cpus.append(Cpu(node_of_cpu.get(cpu, 0), min(parse_cpus(siblings)), cpu))
    return CpuTopology(tuple(sorted(cpus)), cgroup_quota(sys_root, proc_root))


def cgroup_quota(sys_root: str | Path = "/sys", proc_root: str | Path = "/proc") -> float | None:
    """CPUs' worth of time the control group may use (`docker run --cpus`), or None: the tightest of all its parents."""
    root = Path(sys_root) / "fs/cgroup"
    quotas = []
    for line in (_text(Path(proc_root) / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        base = root if not controllers else root / "cpu"
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Inside a container the path may be the host's and not exist here; the mount's root always does.
        folder = base / path.lstrip("/")
        for group in {folder, *folder.parents} | {base}:
            if group == base or base in group.parents:
                quotas.append(_quota_of(group))
    return min((q for q in quotas if q is not None), default=None)


def _quota_of(group: Path) -> float | None:
    v2 = (_text(group / "cpu.max") or "").split()
    quota, period = v2 if len(v2) == 2 else (_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us"))
    if quota in (None, "max", "-1") or not period:
        return None
    return int(quota) / int(period)


def parse_cpus(text: str) -> list[int]:
    """ "0-3,8" -> [0, 1, 2, 3, 8]"""
    cpus = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def format_cpus(cpus: Iterable[int]) -> str:
    """[0, 1, 2, 3, 8] -> "0-3,8" """
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
