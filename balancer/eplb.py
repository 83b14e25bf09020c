"""rebalance_experts with the signature and shapes of DeepSeek's EPLB (github.com/deepseek-ai/EPLB), over plan()."""

import numpy as np

from .plan import plan


def rebalance_experts(
    weight: np.ndarray, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(phy2log [L, P], log2phy [L, E, X], logcnt [L, E]), all int64; X = largest replica count, padded with -1.

    weight: [L, E] load, a numpy array or anything numpy can view (a CPU tensor). num_replicas: all physical slots P.
    As in EPLB, groups stay inside nodes only when num_nodes divides num_groups; otherwise placement is global.
    """
    placement = plan(
        np.asarray(weight), num_slots=num_replicas, num_gpus=num_gpus, num_nodes=num_nodes, num_groups=num_groups
    )
    return placement.physical_to_logical_map, placement.logical_to_physical_map, placement.replica_count
