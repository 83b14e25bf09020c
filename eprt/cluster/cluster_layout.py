"""ClusterLayout: nodes, GPUs and links of a cluster that is planned."""

from dataclasses import dataclass

from eprt.cluster.gpu_speed import SPEEDS, GpuSpeed
from eprt.config import require


@dataclass(frozen=True)
class ClusterLayout:
    num_nodes: int
    gpus_per_node: int = 8
    nic_GBps: float = 50.0  # of each GPU's network card, one direction: 50 for 400 Gbit/s
    gpu: str = "h200"

    def __post_init__(self):
        require(self.num_nodes >= 1, f"--nodes {self.num_nodes}: must be at least 1")
        require(self.gpus_per_node >= 1, f"--gpus-per-node {self.gpus_per_node}: must be at least 1")
        require(self.nic_GBps > 0, f"--nic {self.nic_GBps}: must be above 0 GB/s")
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
