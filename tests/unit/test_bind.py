"""Sharing out cores and NUMA nodes, on made-up machines; and binding this process for real."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from eprt import bind as bind_module
from eprt.bind import plan_binding
from eprt.cpu_topology import Cpu, CpuTopology, cgroup_quota, format_cpus, parse_cpus, read_topology


def machine(num_nodes: int, cores_per_node: int, threads_per_core: int = 1, quota: float | None = None) -> CpuTopology:
    """Numbered as Linux does: first one thread of every core, then their siblings."""
    num_cores = num_nodes * cores_per_node
    cpus = [
        Cpu(core // cores_per_node, core, thread * num_cores + core)
        for core in range(num_cores)
        for thread in range(threads_per_core)
    ]
    return CpuTopology(tuple(sorted(cpus)), quota)


def shares(topology: CpuTopology, local_size: int, policy: str):
    return [plan_binding(topology, rank, local_size, policy) for rank in range(local_size)]


def spans(bindings) -> list[str]:
    return [format_cpus(binding.cpus) for binding in bindings]


def test_core_splits_two_sockets_with_hyper_threads():
    bindings = shares(machine(2, 8, 2), 4, "core")
    assert spans(bindings) == ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]
    assert {b.num_threads for b in bindings} == {4}, "one thread per core, not per hyper-thread"
    assert all(b.bound and b.nodes == () for b in bindings)


def test_numa_shares_the_node_and_its_memory():
    bindings = shares(machine(2, 8, 2), 4, "numa")
    assert spans(bindings) == ["0-7,16-23", "0-7,16-23", "8-15,24-31", "8-15,24-31"]
    assert [b.nodes for b in bindings] == [(0,), (0,), (1,), (1,)]
    assert {b.num_threads for b in bindings} == {4}


def test_one_rank_takes_everything_unbound():
    for policy in ("core", "numa", "none"):
        (binding,) = shares(machine(2, 4), 1, policy)
        assert not binding.bound and binding.num_threads == 8 and len(binding.cpus) == 8
    assert plan_binding(machine(2, 4), 0, 1, "numa").nodes == (0, 1), "interleaved over both"
    assert plan_binding(machine(1, 4), 0, 1, "numa").nodes == (), "one node: nothing to prefer"


def test_fewer_ranks_than_nodes_take_whole_nodes():
    assert spans(shares(machine(4, 2), 2, "core")) == ["0-3", "4-7"]
    assert [b.nodes for b in shares(machine(4, 2), 2, "numa")] == [(0, 1), (2, 3)]
    assert spans(shares(machine(4, 2), 3, "core")) == ["0-1", "2-3", "4-7"]


@pytest.mark.parametrize("policy", ["core", "numa", "none"])
def test_more_ranks_than_cores_run_one_thread_each_unbound(policy):
    for binding in shares(machine(2, 2, 2), 5, policy):
        assert (binding.num_threads, binding.bound, binding.nodes) == (1, False, ())
        assert len(binding.cpus) == 8
        assert "5 ranks share 4 cores" in str(binding)


@pytest.mark.parametrize("local_size", [1, 2, 3, 4, 5, 7, 12])
@pytest.mark.parametrize("nodes,cores", [(1, 12), (2, 6), (3, 4), (4, 3), (12, 1)])
def test_core_uses_every_core_once_and_evenly(nodes, cores, local_size):
    topology = machine(nodes, cores, 2)
    bindings = shares(topology, local_size, "core")
    used = sorted(cpu for binding in bindings for cpu in binding.cpus)
    assert used == list(range(24)), "every hardware thread has exactly one owner"
    assert min(b.num_threads for b in bindings) == 12 // local_size, "the poorest rank has its full share"
    for binding in bindings:  # siblings stay together
        assert {cpu % 12 for cpu in binding.cpus} == {cpu for cpu in binding.cpus if cpu < 12}


def test_an_uneven_cgroup_does_not_starve_a_rank():
    # 6 CPUs of node 0 and 2 of node 1: dealing ranks to nodes would give 6 and 2.
    topology = machine(2, 8).restricted_to([0, 1, 2, 3, 4, 5, 8, 9])
    assert spans(shares(topology, 2, "core")) == ["0-3", "4-5,8-9"]
    assert [b.nodes for b in shares(topology, 2, "numa")] == [(0,), (0, 1)]


def test_a_quota_limits_threads_not_cpus():
    for policy in ("core", "none"):
        bindings = shares(machine(1, 16, quota=4.0), 2, policy)
        assert {b.num_threads for b in bindings} == {2}
    assert spans(shares(machine(1, 16, quota=4.0), 2, "core")) == ["0-7", "8-15"]
    assert {b.num_threads for b in shares(machine(1, 16, quota=0.5), 2, "core")} == {1}


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="--bind socket: must be numa, core, none"):
        plan_binding(machine(1, 1), 0, 1, "socket")
    with pytest.raises(ValueError, match=r"local rank 2 is not in 0\.\.1"):
        plan_binding(machine(1, 4), 2, 2, "core")
    with pytest.raises(ValueError, match="none of the CPUs 9 is online; online are 0-3"):
        machine(1, 4).restricted_to([9])


# ---- reading /sys ---------------------------------------------------------------------------------------------------


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
        Cpu(node, core, cpu) for node, core, cpu in
        [(0, 0, 0), (0, 0, 4), (0, 1, 1), (0, 1, 5), (1, 2, 2), (1, 2, 6), (1, 7, 7)]
    )  # fmt: skip
    assert spans(shares(topology, 4, "core")) == ["0,4", "1,5", "2,6", "7"], "3 is offline"


def test_a_machine_that_tells_nothing_is_one_node(tmp_path):
    write(tmp_path, **{"devices/system/cpu/online": "0-3"})
    topology = read_topology(tmp_path, tmp_path)
    assert topology.nodes == (0,) and topology.num_cores == 4 and topology.quota is None


def test_cgroup_quota_takes_the_tightest_parent(tmp_path):
    write(tmp_path, **{"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "250000 100000",
                       "sys/fs/cgroup/a/b/cpu.max": "max 100000"})  # fmt: skip
    assert cgroup_quota(tmp_path / "sys", tmp_path / "proc") == 2.5
    write(tmp_path, **{"v1proc/self/cgroup": "4:cpu,cpuacct:/gone", "v1/fs/cgroup/cpu/cpu.cfs_quota_us": "150000",
                       "v1/fs/cgroup/cpu/cpu.cfs_period_us": "100000"})  # fmt: skip
    assert cgroup_quota(tmp_path / "v1", tmp_path / "v1proc") == 1.5
    write(tmp_path, **{"v1/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"})
    assert cgroup_quota(tmp_path / "v1", tmp_path / "v1proc") is None


def test_cpu_lists_read_as_linux_writes_them():
    assert parse_cpus("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11] and parse_cpus("") == []
    assert format_cpus([8, 0, 1, 2, 3, 10, 11]) == "0-3,8,10-11" and format_cpus([]) == ""


# ---- binding for real -----------------------------------------------------------------------------------------------


def run_bound(code: str) -> str:
    """Binding changes the process, so it happens in a child."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(read_topology().restricted_to(os.sched_getaffinity(0)).num_cores < 2, reason="needs two cores")
def test_two_ranks_on_this_machine_share_nothing():
    code = """
import os, threading, time, torch
from eprt.bind import bind
threading.Thread(target=time.sleep, args=(20,), daemon=True).start()   # started before binding, bound all the same
twin = lambda me: [me, (me[0], -1, me[2])] if RANK == 0 else [(me[0], -1, me[2]), me]
binding = bind("core", twin)
assert {tuple(sorted(os.sched_getaffinity(int(t)))) for t in os.listdir("/proc/self/task")} == {binding.cpus}
assert torch.get_num_threads() == binding.num_threads
print(*binding.cpus)
"""
    first, second = (run_bound(code.replace("RANK", str(rank))).split() for rank in range(2))
    assert first and second and not set(first) & set(second)


def test_ranks_that_a_launcher_bound_apart_keep_their_cpus():
    code = """
import os
from eprt.bind import bind
allowed = sorted(os.sched_getaffinity(0))
other_host, elsewhere = ("elsewhere", 1, allowed), None
binding = bind("core", lambda me: [(me[0], -1, [*me[2], 9999]), me, other_host])
assert list(binding.cpus) == allowed and not binding.bound, binding
print(binding)
"""
    assert "within what the launcher gave" in run_bound(code)


def test_a_refused_affinity_says_what_to_do(monkeypatch):
    def refuse(pid, cpus):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(bind_module.os, "sched_setaffinity", refuse)
    topology = machine(1, 4)
    monkeypatch.setattr(bind_module, "read_topology", lambda: topology)
    monkeypatch.setattr(bind_module.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    with pytest.raises(
        bind_module.BindError, match=r"rank 0/2\] cannot bind to CPUs 0-1: Operation not permitted.*--bind none"
    ):
        bind_module.bind("core", lambda me: [me, (me[0], -1, me[2])])


def test_a_refused_memory_policy_is_told_not_fatal(monkeypatch):
    monkeypatch.setattr(bind_module, "_set_memory_policy", lambda nodes: "Operation not permitted")
    monkeypatch.setattr(bind_module, "read_topology", lambda: replace(machine(2, 2)))
    monkeypatch.setattr(bind_module.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    import torch

    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    binding = bind_module.bind("numa")
    assert binding.nodes == () and "set_mempolicy: Operation not permitted" in str(binding)
