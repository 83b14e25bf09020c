"""rebalance_experts: the signature and results of DeepSeek's EPLB (github.com/deepseek-ai/EPLB), much faster.

GPU loads equal EPLB's on any input. The maps equal those of an EPLB with stable sorts; torch's sorts are not stable, so
EPLB's own maps depend on the torch build where loads tie. Like EPLB, and unlike plan(), it may put several replicas of
an expert on one GPU.
"""

from typing import Any

import numpy as np

from .checks import check_values
from .core import CEplbShape, call_native, num_threads
from .loads import check_load


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(phy2log [L, P], log2phy [L, E, X], logcnt [L, E]), all int64; X = largest replica count, padded with -1.

    As in EPLB, load is rounded to fp32, and groups stay inside nodes only if num_nodes divides num_groups; otherwise
    the placement is global. Slot s is on GPU s // (P / num_gpus). ValueError names the argument that does not fit.

    weight: load [L, E], a numpy array or anything numpy can view (a CPU tensor).
    num_replicas: P, the number of all physical slots.
    """
    wide_LE = check_load(weight, name="weight")
    check_values(wide_LE > np.finfo(np.float32).max, wide_LE, "weight", ("layer", "expert"), "EPLB plans in fp32")
    load_LE = np.ascontiguousarray(wide_LE, dtype=np.float32)
    num_layers, num_experts = load_LE.shape
    hierarchical = num_groups > 0 and num_nodes > 0 and num_groups % num_nodes == 0
    groups, nodes = (num_groups, num_nodes) if hierarchical else (1, 1)
    _check(num_experts, num_replicas, groups, nodes, num_gpus)
    phy2log = np.empty((num_layers, num_replicas), dtype=np.int64)
    replica_LP = np.empty_like(phy2log)
    shape = CEplbShape(num_experts, num_replicas, groups, nodes, num_gpus)
    call_native("eprt_eplb", num_layers, shape, num_threads(None), load_LE, phy2log, replica_LP)
    layer_LP = np.broadcast_to(np.arange(num_layers)[:, None], phy2log.shape)
    logcnt = np.bincount((layer_LP * num_experts + phy2log).ravel(), minlength=load_LE.size).reshape(load_LE.shape)
    log2phy = np.full((num_layers, num_experts, int(logcnt.max())), -1, dtype=np.int64)
    log2phy[layer_LP, phy2log, replica_LP] = np.arange(num_replicas)
    return phy2log, log2phy, logcnt.astype(np.int64, copy=False)


def _check(num_experts: int, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> None:
    for name, value, divisor_name, divisor in (
        ("num_replicas", num_replicas, "num_gpus", num_gpus),
        ("num_gpus", num_gpus, "num_nodes", num_nodes),
        ("the number of experts", num_experts, "num_groups", num_groups),
    ):
        if value < 1 or divisor < 1 or value % divisor:
            raise ValueError(f"{name}={value} is not a positive multiple of {divisor_name}={divisor}")
    if num_replicas < num_experts:
        raise ValueError(f"num_replicas={num_replicas} counts all physical slots; it cannot hold {num_experts} experts")
