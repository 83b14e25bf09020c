"""ClusterLayout: nodes, GPUs and links of a cluster that is planned."""

from dataclasses import dataclass

from eprt.cluster.gpu_speed import SPEEDS, GpuSpeed
from eprt.config import require

_MOST = 10**9  # far beyond any cluster or request; larger figures would not fit into a float's arithmetic
_SLOWEST_GBPS = 1e-6  # of a card


def require_between(flag: str, value: float, least: float) -> None:
    """ValueError for a value below `least`, beyond all measure, or not a number."""
    require(value >= least, f"{flag} {value}: must be at least {least}")
    require(value <= _MOST, f"{flag} {value}: must be at most {_MOST}")


@dataclass(frozen=True)
class ClusterLayout:
    num_nodes: int
    gpus_per_node: int = 8
    nic_GBps: float = 50.0  # of each GPU's network card, one direction: 50 for 400 Gbit/s
    gpu: str = "h200"

    def __post_init__(self):
        require_between("--nodes", self.num_nodes, 1)
        require_between("--gpus-per-node", self.gpus_per_node, 1)
        require(self.nic_GBps > 0, f"--nic {self.nic_GBps}: must be above 0 GB/s")
        require_between("--nic", self.nic_GBps, _SLOWEST_GBPS)
        require(self.gpu in SPEEDS, f"--gpu {self.gpu!r}: must be one of {', '.join(SPEEDS)}")

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def speed(self) -> GpuSpeed:
        return SPEEDS[self.gpu]

    def group_sizes(self) -> list[int]:
        """Sizes of expert-parallel groups to look at: a node, doubled as long as it fits, and the whole cluster."""
        sizes, size = [], self.gpus_per_node
        while size < self.num_gpus:
            sizes.append(size)
            size *= 2
        return [*sizes, self.num_gpus]
