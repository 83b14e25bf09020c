"""How many ranks `eprt serve` starts on CPUs where -n does not say: one for each NUMA node, where the container's CPU
time is enough for as many threads.

A rank's threads share one copy of attention and of every expert, so a rank with all cores of a node is at least as fast
as several with fewer each; between nodes, ranks keep each node's reads in its own memory. Knows nothing of models.
"""

import os

from eprt.cpu_topology import CpuTopology, read_topology


def default_ranks(topology: CpuTopology | None = None) -> int:
    """A power of 2, which divides the experts of the models that are served. topology: default what this process may
    use."""
    if topology is None:
        topology = read_topology().restricted_to(os.sched_getaffinity(0))
    most = len(topology.nodes) if topology.quota is None else min(len(topology.nodes), max(1, int(topology.quota)))
    return 1 << (most.bit_length() - 1)
