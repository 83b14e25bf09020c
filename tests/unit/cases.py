"""What tests of several top-level modules share: where the demo model is, and machines that do not exist."""

from pathlib import Path

from eprt.bind import plan_binding
from eprt.cpu_topology import Cpu, CpuTopology, format_cpus
from eprt.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "demo_model" / "checkpoint"


def machine_facts(**changes) -> Machine:
    values = {
        "system": "Linux",
        "python": "3.12.1",
        "cpu_model": "CPU",
        "num_cores": 4,
        "num_cpus": 8,
        "num_numa_nodes": 2,
        "cpu_quota": None,
        "isa_levels": ("scalar", "avx2"),
        "memory_gb": 64.0,
        "shm_free_gb": 32.0,
        "gpus": (),
        "versions": {},
    }
    return Machine(**{**values, **changes})


def made_up_machine(
    num_nodes: int, cores_per_node: int, threads_per_core: int = 1, quota: float | None = None
) -> CpuTopology:
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
