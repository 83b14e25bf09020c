"""Sharing out cores and NUMA nodes, on made-up machines; and binding this process for real."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from eprt import bind as bind_module
from eprt.bind import crowding, far_memory, overlap, plan_binding
from eprt.cpu_topology import read_topology
from tests.unit.cases import made_up_machine, shares, spans


def test_core_splits_two_sockets_with_hyper_threads():
    bindings = shares(made_up_machine(2, 8, 2), 4, "core")
    assert spans(bindings) == ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]
    assert {b.num_threads for b in bindings} == {4}, "one thread per core, not per hyper-thread"
    assert all(b.bound and b.warning is None for b in bindings)
    assert [b.nodes for b in bindings] == [(0,), (0,), (1,), (1,)], "memory of the cores' own node"


def test_numa_shares_the_node_and_its_memory():
    bindings = shares(made_up_machine(2, 8, 2), 4, "numa")
    assert spans(bindings) == ["0-7,16-23", "0-7,16-23", "8-15,24-31", "8-15,24-31"]
    assert [b.nodes for b in bindings] == [(0,), (0,), (1,), (1,)]
    assert {b.num_threads for b in bindings} == {4}


def test_one_rank_takes_everything_unbound():
    for policy in ("core", "numa", "none"):
        (binding,) = shares(made_up_machine(2, 4), 1, policy)
        assert not binding.bound and binding.num_threads == 8 and len(binding.cpus) == 8
    assert plan_binding(made_up_machine(2, 4), 0, 1, "numa").nodes == (0, 1), "interleaved over both"
    assert plan_binding(made_up_machine(1, 4), 0, 1, "numa").nodes == (), "one node: nothing to prefer"


def test_fewer_ranks_than_nodes_take_whole_nodes():
    assert spans(shares(made_up_machine(4, 2), 2, "core")) == ["0-3", "4-7"]
    assert [b.nodes for b in shares(made_up_machine(4, 2), 2, "numa")] == [(0, 1), (2, 3)]
    assert spans(shares(made_up_machine(4, 2), 3, "core")) == ["0-1", "2-3", "4-7"]


@pytest.mark.parametrize("policy", ["core", "numa", "none"])
def test_more_ranks_than_cores_run_one_thread_each_unbound(policy):
    for binding in shares(made_up_machine(2, 2, 2), 5, policy):
        assert (binding.num_threads, binding.bound, binding.nodes) == (1, False, ())
        assert len(binding.cpus) == 8
        assert "5 ranks share 4 cores" in str(binding)
        assert binding.warning and "-n 1 is faster" in binding.warning


@pytest.mark.parametrize("local_size", [1, 2, 3, 4, 5, 7, 12])
@pytest.mark.parametrize("nodes,cores", [(1, 12), (2, 6), (3, 4), (4, 3), (12, 1)])
def test_core_uses_every_core_once_and_evenly(nodes, cores, local_size):
    topology = made_up_machine(nodes, cores, 2)
    bindings = shares(topology, local_size, "core")
    used = sorted(cpu for binding in bindings for cpu in binding.cpus)
    assert used == list(range(24)), "every hardware thread has exactly one owner"
    assert min(b.num_threads for b in bindings) == 12 // local_size, "the poorest rank has its full share"
    for binding in bindings:  # siblings stay together
        assert {cpu % 12 for cpu in binding.cpus} == {cpu for cpu in binding.cpus if cpu < 12}


def test_an_uneven_cgroup_does_not_starve_a_rank():
    # 6 CPUs of node 0 and 2 of node 1: dealing ranks to nodes would give 6 and 2.
    topology = made_up_machine(2, 8).restricted_to([0, 1, 2, 3, 4, 5, 8, 9])
    assert spans(shares(topology, 2, "core")) == ["0-3", "4-5,8-9"]
    assert [b.nodes for b in shares(topology, 2, "numa")] == [(0,), (0, 1)]


def test_a_quota_limits_threads_not_cpus():
    for policy in ("core", "none"):
        bindings = shares(made_up_machine(1, 16, quota=4.0), 2, policy)
        assert {b.num_threads for b in bindings} == {2}
    assert spans(shares(made_up_machine(1, 16, quota=4.0), 2, "core")) == ["0-7", "8-15"]
    assert {b.num_threads for b in shares(made_up_machine(1, 16, quota=0.5), 2, "core")} == {1}


def test_more_ranks_than_a_quota_has_cpus_are_warned_of():
    for policy in ("core", "numa", "none"):
        for binding in shares(made_up_machine(1, 16, quota=2.5), 4, policy):
            assert binding.num_threads == 1 and binding.warning
            assert binding.warning.startswith("4 ranks have 2.5 CPUs' worth of time")
    assert [b.warning for b in shares(made_up_machine(1, 16, quota=4.0), 4, "core")] == [None] * 4
    assert plan_binding(made_up_machine(1, 16, quota=0.5), 0, 1, "core").warning is None, "fewer ranks there are not"


def test_cpus_that_a_launcher_gave_twice_are_told():
    assert overlap([[0, 1], [2, 3], [0, 1]]) is None and overlap([[0, 1, 2]] * 4) is None
    told = overlap([[0, 1, 2, 3], [4, 5], [2, 3, 4]])
    assert told and told.startswith(
        "the launcher gave one rank the CPUs 0-3 and another 2-4: their threads take turns on 2-3"
    )


def test_memory_on_other_nodes_is_told_and_much_of_it_warned_of():
    assert far_memory((1,), {0: 2 * 10**9, 1: 30 * 10**9}) == ("30.0 GB on NUMA node 1, 2.0 GB elsewhere", False)
    text, is_far = far_memory((1,), {0: 9 * 10**9, 1: 30 * 10**9})
    assert is_far and text.startswith("30.0 GB on NUMA node 1, 9.0 GB elsewhere, from where reads are slower")
    assert far_memory((0, 1), {0: 9 * 10**9, 1: 30 * 10**9}) == ("39.0 GB on NUMA node 0-1, 0.0 GB elsewhere", False)
    assert far_memory((0,), {}) == ("", False), "the kernel does not tell"


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="--bind socket: must be numa, core or none"):
        plan_binding(made_up_machine(1, 1), 0, 1, "socket")
    with pytest.raises(ValueError, match=r"local rank 2 is not in 0\.\.1"):
        plan_binding(made_up_machine(1, 4), 2, 2, "core")


# ---- binding for real -----------------------------------------------------------------------------------------------


def run_bound(code: str) -> str:
    """Binding changes the process, so it happens in a child."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
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
    assert "within the launcher's binding" in run_bound(code)


# Two NUMA nodes, as Linux describes them: the first CPU that this process may use is of the first one.
TWO_NODES = """
import functools, logging, os, pathlib, sys, tempfile
import eprt.bind
allowed = sorted(os.sched_getaffinity(0))
folder = tempfile.TemporaryDirectory()
root = pathlib.Path(folder.name)
for name, text in {"cpu/online": ",".join(map(str, allowed)), "node/node0/cpulist": str(allowed[0]),
                   "node/node1/cpulist": ",".join(map(str, allowed[1:]))}.items():
    path = root / "devices/system" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
eprt.bind.read_topology = functools.partial(eprt.bind.read_topology, root, root)
"""


@pytest.mark.skipif(read_topology().restricted_to(os.sched_getaffinity(0)).num_cores < 2, reason="needs two cores")
def test_each_rank_of_two_nodes_takes_memory_from_its_own():
    """The first node is there; a second one has to be, or the kernel refuses it."""
    code = (
        TWO_NODES
        + """
from eprt.memory_nodes import preferred_nodes
twin = lambda me: [me, (me[0], -1, me[2])] if RANK == 0 else [(me[0], -1, me[2]), me]
binding = eprt.bind.bind("core", twin)
assert binding.cpus == tuple(allowed[:1] if RANK == 0 else allowed[1:]) == tuple(sorted(os.sched_getaffinity(0)))
try:
    assert preferred_nodes() == binding.nodes
except PermissionError:
    pass
print(binding)
"""
    )
    first, second = (run_bound(code.replace("RANK", str(rank))) for rank in range(2))
    assert "memory of NUMA node 0, 1 thread (--bind core)" in first or "set_mempolicy" in first
    if not os.path.isdir("/sys/devices/system/node/node1"):
        assert "(--bind core; set_mempolicy: " in second and "memory of" not in second


@pytest.mark.skipif(read_topology().restricted_to(os.sched_getaffinity(0)).num_cores < 2, reason="needs two cores")
def test_a_rank_of_a_server_says_on_which_nodes_its_weights_lie():
    code = (
        TWO_NODES
        + """
from eprt.config import EngineConfig
from eprt.ep.group.group import EPGroup
from eprt.serve.options import ServeOptions
from eprt.serve.ranks import start_engine
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
class Sent(list):
    send = list.append
options = ServeOptions(EngineConfig(model_dir="examples/demo_model/checkpoint", kv_cache_gb=0.01), "demo")
start_engine.load(options, EPGroup.single(), Sent())
"""
    )
    said = run_bound(code)
    if "set_mempolicy" not in said:
        assert "[rank 0/1] CPUs" in said and "memory of NUMA node 0-1" in said
        assert "[rank 0/1] memory: 0." in said and "GB on NUMA node 0-1, 0.0 GB elsewhere" in said


def test_a_refused_affinity_says_what_to_do(monkeypatch):
    def refuse(pid, cpus):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(bind_module.os, "sched_setaffinity", refuse)
    topology = made_up_machine(1, 4)
    monkeypatch.setattr(bind_module, "read_topology", lambda: topology)
    monkeypatch.setattr(bind_module.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    with pytest.raises(
        bind_module.BindError, match=r"rank 0/2\] cannot bind to CPUs 0-1: Operation not permitted.*--bind none"
    ):
        bind_module.bind("core", lambda me: [me, (me[0], -1, me[2])])


def test_a_refused_memory_policy_is_told_not_fatal(monkeypatch):
    def refuse(nodes):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(bind_module, "prefer_nodes", refuse)
    monkeypatch.setattr(bind_module, "read_topology", lambda: replace(made_up_machine(2, 2)))
    monkeypatch.setattr(bind_module.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    import torch

    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    binding = bind_module.bind("numa")
    assert binding.nodes == () and "set_mempolicy: Operation not permitted" in str(binding)


def test_other_busy_programs_are_told():
    """Beyond one process for each CPU, and one for each rank that starts just now."""
    assert crowding(load=2.9, num_ranks=1, num_cpus=2) is None
    told = crowding(load=12.4, num_ranks=1, num_cpus=2)
    assert told and told.startswith("other programs want about 11 of the 2 CPUs")
    assert crowding(load=18.0, num_ranks=4, num_cpus=16) is None


def test_a_quota_is_told():
    topology = replace(made_up_machine(1, 8), quota=2.5)
    (binding,) = shares(topology, 1, "core")
    assert binding.num_threads == 2 and "2.5 CPUs' worth of time" in str(binding)
