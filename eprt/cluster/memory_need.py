"""MemoryNeed: bytes of one GPU, and the copies of experts that let a group live on without one of its nodes."""

from dataclasses import dataclass

from eprt.cluster.cluster_layout import ClusterLayout
from eprt.cluster.model_cost import ModelCost

_FOR_WEIGHTS_AND_CACHE = 0.9  # of a GPU's memory; the rest is for buffers, graphs and the driver


@dataclass(frozen=True)
class MemoryNeed:
    """What a GPU of a group holds."""

    slots: int  # places of experts in each layer
    dense_gb: float  # 10^9 bytes
    experts_gb: float
    left_gb: float  # for the cache; negative where the weights do not fit
    cached_tokens: int  # that fit into what is left
    slots_without_a_node: int | None  # of a GPU, with which the other nodes hold every expert; None: one node
    slots_with_every_expert_twice: int  # of a GPU, so that no expert must be copied when a node is lost

    @property
    def fits(self) -> bool:
        return self.cached_tokens > 0


def memory_need(layout: ClusterLayout, model: ModelCost, num_ranks: int, redundant: int) -> MemoryNeed:
    experts = model.moe.num_experts
    slots = -(-(experts + redundant) // num_ranks)
    dense = model.dense_bytes()
    held = slots * model.expert_bytes * model.num_moe_layers
    left = _FOR_WEIGHTS_AND_CACHE * layout.speed.memory_gb * 1e9 - dense - held
    others = num_ranks - layout.gpus_per_node
    return MemoryNeed(
        slots=slots,
        dense_gb=dense / 1e9,
        experts_gb=held / 1e9,
        left_gb=left / 1e9,
        cached_tokens=max(0, int(left // model.cache_bytes)),
        slots_without_a_node=-(-experts // others) if others > 0 else None,
        slots_with_every_expert_twice=-(-2 * experts // num_ranks),
    )
