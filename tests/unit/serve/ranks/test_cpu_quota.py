"""How often a process was kept from its cores: cgroups of both versions, moves between them, and run queues."""

from pathlib import Path

import pytest

from eprt.serve.ranks.cpu_quota import CpuQuota, RunQueue, stat_files

V1, V2 = "nr_periods 9\nnr_throttled {}\nthrottled_time {}000\n", "usage_usec 5\nnr_throttled {}\nthrottled_usec {}\n"


class Host:
    """A file system of cgroups."""

    def __init__(self, root: Path, version: int):
        self.root, self.version = root, version
        self.cgroup, self.mounts = root / "cgroup", root / "mountinfo"
        kind = "cgroup cgroup rw,cpu,cpuacct" if version == 1 else "cgroup2 cgroup rw"
        self.mounts.write_text(
            f"30 20 0:1 / /proc rw - proc proc rw\n31 20 0:2 / {root}/fs rw,relatime - {kind}\n"
            f"32 20 0:3 / {root}/memory rw - cgroup cgroup rw,memory\n"
        )

    def write(self, group: str, periods: int, microseconds: int) -> None:
        folder = self.root / "fs" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.stat").write_text((V1 if self.version == 1 else V2).format(periods, microseconds))

    def move_to(self, group: str) -> None:
        line = f"4:cpu,cpuacct:/{group}" if self.version == 1 else f"0::/{group}"
        self.cgroup.write_text(f"5:memory:/elsewhere\n{line}\n")

    def quota(self) -> CpuQuota:
        return CpuQuota(self.cgroup, self.mounts)


@pytest.fixture(params=[1, 2])
def host(tmp_path, request) -> Host:
    return Host(tmp_path, request.param)


def test_what_a_quota_cost_counts_from_the_first_look(host):
    host.write("job/rank3", 100, 5000)
    host.move_to("job/rank3")
    quota = host.quota()
    assert quota.totals() == (0, 0.0), "before, it was somebody else's"
    host.write("job/rank3", 107, 5900)
    assert quota.totals() == (7, 900.0)
    host.write("job/rank3", 110, 6000)
    assert quota.totals() == (10, 1000.0)


def test_of_nested_quotas_the_one_that_cost_most_counts(host):
    host.write("job", 0, 0)
    host.write("job/rank3", 0, 0)
    host.move_to("job/rank3")
    quota = host.quota()
    quota.totals()
    host.write("job", 5, 800)
    host.write("job/rank3", 1, 100)
    assert quota.totals() == (5, 800.0)


def test_a_process_that_is_moved_leaves_nothing_behind_and_brings_nothing(host):
    for group in ("a", "b"):
        host.write(group, 50, 50_000)
    host.move_to("a")
    quota = host.quota()
    quota.totals()
    host.write("a", 52, 50_200)
    assert quota.totals() == (2, 200.0)
    host.move_to("b")
    host.write("b", 60, 60_000)
    assert quota.totals() == (2, 200.0)
    host.write("b", 61, 60_300)
    assert quota.totals() == (3, 500.0)


def test_without_a_counter_nothing_is_told(host):
    host.move_to("job")
    (host.root / "fs" / "job").mkdir(parents=True)
    (host.root / "fs" / "job" / "cpu.stat").write_text("usage_usec 5\n")
    assert host.quota().totals() is None
    assert CpuQuota(host.root / "missing", host.mounts).totals() is None


def test_a_container_sees_its_cgroup_at_its_mount(tmp_path):
    """Its path is told from the host's root, its mount begins inside."""
    folder = tmp_path / "fs" / "inner"
    folder.mkdir(parents=True)
    (folder / "cpu.stat").write_text(V2.format(1, 2))
    mounts = f"31 20 0:2 /docker/abc {tmp_path}/fs rw - cgroup2 cgroup rw\n"
    assert stat_files("0::/docker/abc/inner\n", mounts) == [folder / "cpu.stat"]


def test_the_time_without_a_core_is_the_kernels(tmp_path):
    (tmp_path / "schedstat").write_text("5000000 1234000 17\n")
    assert RunQueue(tmp_path).waited_us() == 1234.0
    (tmp_path / "schedstat").write_text("0 0 0\n")
    assert RunQueue(tmp_path).waited_us() is None, "the kernel does not count it"
    assert RunQueue(tmp_path / "missing").waited_us() is None


def test_of_this_process():
    waited_us = RunQueue().waited_us()
    assert waited_us is None or waited_us >= 0
    totals = CpuQuota().totals()
    assert totals is None or totals == (0, 0.0)
