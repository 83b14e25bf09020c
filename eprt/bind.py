"""Binds each rank to its share of the machine's cores and NUMA nodes, and sizes its threads from it.

    binding = bind("core", group.allgather)     # every rank of the job, before its first torch operation

    core   each rank gets whole cores of its own, inside one NUMA node where that takes no core from another rank
    numa   each rank may use every core of its NUMA node(s)
    none   the operating system places everything

core and numa take a rank's memory from its NUMA nodes. In every policy a rank runs as many threads as its share has
cores. Where there are more ranks than cores no rank is bound and each runs one thread: two ranks bound to one core
could only take turns. Knows nothing of MPI or of models.
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eprt.cpu_topology import Cpu, CpuTopology, format_cpus, read_topology
from eprt.memory_nodes import own_memory, prefer_nodes

DEFAULT_POLICY = "core"
_MOST_ELSEWHERE = 0.1  # of a rank's memory, before it is worth a warning


@dataclass(frozen=True)
class Binding:
    """One rank's share of its host."""

    cpus: tuple[int, ...]  # hardware threads that the rank may use
    nodes: tuple[int, ...]  # NUMA nodes to take memory from, () for no preference
    num_threads: int  # compute threads
    bound: bool  # False where cpus is everything the job may use
    reason: str  # one clause for the log
    warning: str | None = None  # why the ranks of this host will be slow: too little to run them on

    def __str__(self) -> str:
        memory = f", memory of NUMA node {format_cpus(self.nodes)}" if self.nodes else ""
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return f"CPUs {format_cpus(self.cpus)}{memory}, {threads} ({self.reason})"


class BindError(RuntimeError):
    """A rank cannot be bound as asked."""


def check_policy(policy: str) -> None:
    if policy not in ("numa", "core", "none"):
        raise ValueError(f"--bind {policy}: must be numa, core or none")


def plan_binding(topology: CpuTopology, local_rank: int, local_size: int, policy: str) -> Binding:
    """The share of rank local_rank among local_size ranks on this host. topology: what the job may use."""
    check_policy(policy)
    if not 0 <= local_rank < local_size:
        raise ValueError(f"local rank {local_rank} is not in 0..{local_size - 1}")
    everything = tuple(cpu.id for cpu in topology.cpus)
    num_cores = topology.num_cores
    time_share = max(1, int((topology.quota or num_cores) / local_size))
    if local_size > num_cores:
        shared = f"{local_size} ranks share {num_cores} cores"
        return Binding(
            everything, (), 1, False, shared, f"{shared} and wait for each other's turns; -n 1 is faster here"
        )
    reason, warning = f"--bind {policy}", None
    if topology.quota is not None and topology.quota < num_cores:
        reason += f", {topology.quota:g} CPUs' worth of time"
        if max(1.0, topology.quota) < local_size:
            warning = (
                f"{local_size} ranks have {topology.quota:g} CPUs' worth of time, and are stopped whenever it is used "
                "up; start fewer ranks, or raise the container's limit"
            )
    if policy == "none":
        return Binding(everything, (), min(num_cores // local_size, time_share), False, reason, warning)
    cores = _own_cores(topology, local_rank, local_size)
    num_threads = min(len(cores), time_share)
    nodes = tuple(sorted({core[0].node for core in cores}))
    memory = nodes if len(topology.nodes) > 1 else ()
    if policy == "core":
        cpus = tuple(sorted(cpu.id for core in cores for cpu in core))
    else:
        cpus = tuple(sorted(cpu.id for cpu in topology.cpus if cpu.node in nodes))
    return Binding(cpus, memory, num_threads, len(cpus) < len(everything), reason, warning)


def overlap(allowed: Sequence[Sequence[int]]) -> str | None:
    """What to say where a launcher gave ranks of a host CPUs that others have, too, but not the same ones: each rank
    runs threads for all of its own. allowed: the CPUs of each rank. None where any two have all in common, or none."""
    sets = sorted({tuple(cpus) for cpus in allowed})
    for i, first in enumerate(sets):
        for second in sets[i + 1 :]:
            if common := set(first) & set(second):
                return (
                    f"the launcher gave one rank the CPUs {format_cpus(first)} and another {format_cpus(second)}: "
                    f"their threads take turns on {format_cpus(common)}; have it bind ranks apart, or not at all "
                    "(mpirun --bind-to none): then they share the cores out"
                )
    return None


def far_memory(nodes: Sequence[int], found: Mapping[int, int] | None = None) -> tuple[str, bool]:
    """Where this rank's memory lies that is meant to be on these nodes, for the log, and whether too much of it is
    elsewhere. found: bytes by node, default this process's own. ("", False) where the kernel does not tell."""
    found = own_memory() if found is None else found
    here, elsewhere = (sum(b for node, b in found.items() if (node in nodes) == near) for near in (True, False))
    if here + elsewhere == 0:
        return "", False
    text = f"{here / 1e9:.1f} GB on NUMA node {format_cpus(nodes)}, {elsewhere / 1e9:.1f} GB elsewhere"
    is_far = elsewhere > _MOST_ELSEWHERE * (here + elsewhere)
    if is_far:
        text += (
            ", from where reads are slower: the node was full, of files that were read (before the next start: "
            "echo 1 > /proc/sys/vm/drop_caches) or of caches too large for it (a lower --memory-fraction)"
        )
    return text, is_far


def crowding(load: float, num_ranks: int, num_cpus: int) -> str | None:
    """What to say of a host where other programs keep the CPUs busy. load: processes that run or want to run, the ranks
    that start right now among them; None where there is room."""
    if load <= num_cpus + num_ranks:
        return None
    return (
        f"other programs want about {load - num_ranks:.0f} of the {num_cpus} CPUs that these ranks may use; "
        "each step waits for the threads that they delay"
    )


def _own_cores(topology: CpuTopology, local_rank: int, local_size: int) -> list[list[Cpu]]:
    """The cores of one rank, each as a list of its hardware threads. Ranks are spread over NUMA nodes evenly where the
    rank with the fewest cores then has no fewer than under one plain cut through all cores; the ranks move in lockstep,
    so that rank sets the pace."""
    by_core: dict[int, list[Cpu]] = {}
    for cpu in topology.cpus:  # sorted by node, then core
        by_core.setdefault(cpu.core, []).append(cpu)
    cores = list(by_core.values())
    plain = [_cut(cores, r, local_size) for r in range(local_size)]
    nodes = topology.nodes
    if local_size < len(nodes):
        aligned = [[core for core in cores if core[0].node in _cut(nodes, r, local_size)] for r in range(local_size)]
    else:
        node_of_rank = [r * len(nodes) // local_size for r in range(local_size)]
        aligned = []
        for rank, node in enumerate(node_of_rank):
            here = [core for core in cores if core[0].node == nodes[node]]
            aligned.append(_cut(here, rank - node_of_rank.index(node), node_of_rank.count(node)))
    shares = aligned if min(map(len, aligned)) >= min(map(len, plain)) else plain
    return shares[local_rank]


def _cut(items: Any, index: int, count: int) -> Any:
    """Part `index` of `count` nearly equal parts of a sequence."""
    return items[len(items) * index // count : len(items) * (index + 1) // count]


def bind(policy: str, allgather: Callable[[Any], list[Any]] = lambda value: [value]) -> Binding:
    """Binds the calling rank and sizes torch's threads; returns what was done, for the log. allgather: collective over
    all ranks of the job (EPGroup.allgather); hosts are told apart by their names. A binding that the launcher has made
    stays: only ranks to which it gave the same CPUs share them out. BindError names rank, CPUs and remedy."""
    allowed = sorted(os.sched_getaffinity(0))
    me = (socket.gethostname(), os.getpid(), allowed)
    here = [other for other in allgather(me) if other[0] == me[0]]
    sharers = [other for other in here if other[2] == allowed]
    rank, size = sharers.index(me), len(sharers)
    topology = read_topology().restricted_to(allowed)
    if topology.quota is not None:
        topology = replace(topology, quota=topology.quota * size / len(here))
    binding = plan_binding(topology, rank, size, policy)
    told = binding.warning or overlap([other[2] for other in here])
    binding = replace(binding, warning=told or crowding(os.getloadavg()[0], len(here), len(topology.cpus)))
    if size < len(here):
        binding = replace(binding, reason=f"{binding.reason} within the launcher's binding")
    if binding.bound:
        _set_affinity(binding, f"[local rank {here.index(me)}/{len(here)}]", allowed)
    if binding.nodes:
        try:
            prefer_nodes(binding.nodes)
        except OSError as error:  # containers forbid it by default; pages are then on the node that first touches them
            reason = f"{binding.reason}; set_mempolicy: {error.strerror or error}"
            binding = replace(binding, nodes=(), reason=reason)
    import torch

    torch.set_num_threads(binding.num_threads)
    return binding


def _set_affinity(binding: Binding, who: str, allowed: list[int]) -> None:
    try:
        for thread in os.listdir("/proc/self/task"):  # threads that libraries started before are bound too
            try:
                os.sched_setaffinity(int(thread), binding.cpus)
            except ProcessLookupError:
                continue
    except OSError as error:
        raise BindError(
            f"{who} cannot bind to CPUs {format_cpus(binding.cpus)}: {error.strerror}; this process may use "
            f"{format_cpus(allowed)}. Start with --bind none to leave the placement to the operating system."
        ) from None
