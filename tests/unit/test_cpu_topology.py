"""CPUs, cores, NUMA nodes and quotas, read from made-up /sys and /proc."""

import pytest

from eprt.cpu_topology import Cpu, cgroup_quota, format_cpus, parse_cpus, read_topology
from tests.unit.cases import made_up_machine, shares, spans


def write(root, **files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_reads_nodes_siblings_and_offline_cpus(tmp_path):
    system = "sys/devices/system"
    files = {f"{system}/cpu/online": "0-2,4-7", f"{system}/node/node0/cpulist": "0-1,4-5"}
    files[f"{system}/node/node1/cpulist"] = "2-3,6-7"
    for cpu in range(8):
        files[f"{system}/cpu/cpu{cpu}/topology/core_cpus_list"] = f"{cpu % 4},{cpu % 4 + 4}" if cpu % 4 != 3 else "7"
    write(tmp_path, **files)
    topology = read_topology(tmp_path / "sys", tmp_path / "proc")
    assert topology.cpus == tuple(
        Cpu(node, core, cpu)
        for node, core, cpu in [(0, 0, 0), (0, 0, 4), (0, 1, 1), (0, 1, 5), (1, 2, 2), (1, 2, 6), (1, 7, 7)]
    )
    assert spans(shares(topology, 4, "core")) == ["0,4", "1,5", "2,6", "7"], "3 is offline"


def test_a_machine_that_tells_nothing_is_one_node(tmp_path):
    write(tmp_path, **{"devices/system/cpu/online": "0-3"})
    topology = read_topology(tmp_path, tmp_path)
    assert topology.nodes == (0,) and topology.num_cores == 4 and topology.quota is None


def test_cgroup_quota_takes_the_tightest_parent(tmp_path):
    write(
        tmp_path,
        **{
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/a/cpu.max": "250000 100000",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000",
        },
    )
    assert cgroup_quota(tmp_path / "sys", tmp_path / "proc") == 2.5
    write(
        tmp_path,
        **{
            "v1proc/self/cgroup": "4:cpu,cpuacct:/gone",
            "v1/fs/cgroup/cpu/cpu.cfs_quota_us": "150000",
            "v1/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert cgroup_quota(tmp_path / "v1", tmp_path / "v1proc") == 1.5
    write(tmp_path, **{"v1/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"})
    assert cgroup_quota(tmp_path / "v1", tmp_path / "v1proc") is None


def test_cpu_lists_read_as_linux_writes_them():
    assert parse_cpus("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11] and parse_cpus("") == []
    assert format_cpus([8, 0, 1, 2, 3, 10, 11]) == "0-3,8,10-11" and format_cpus([]) == ""


def test_cpus_that_are_not_online_are_named():
    with pytest.raises(ValueError, match="none of the CPUs 9 is online; online are 0-3"):
        made_up_machine(1, 4).restricted_to([9])
