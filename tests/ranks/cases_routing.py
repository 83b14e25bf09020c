"""Splits of a batch over replicas, on every rank: whole, even, local, and the same as computed in one place."""

from dataclasses import replace

import numpy as np
import torch
from eprt.balancer import Placement, plan
from eprt.balancer.split import ReplicaTable, split_batch

from eprt import EPGroup
from eprt.ep.placement.batch_router import METHODS, BatchRouter
from eprt.ep.placement.slot_map import SlotMap

NUM_EXPERTS, TOP_K = 12, 3


def batches(group: EPGroup) -> dict[str, list[torch.Tensor]]:
    """Each rank's choices [T, K], by what is special about them; the same on all ranks."""
    rng = np.random.default_rng(0)

    def choices(num_tokens: int, skew: float = 0.0) -> torch.Tensor:
        score_TE = rng.gumbel(size=(num_tokens, NUM_EXPERTS)) - skew * np.arange(NUM_EXPERTS)
        return torch.from_numpy(np.argsort(-score_TE, axis=1)[:, :TOP_K].copy())

    masked = [choices(20) for _ in range(group.size)]
    for part in masked:
        part[::3] = -1
        part[1::4, 1] = -1
    return {
        "even": [choices(50) for _ in range(group.size)],
        "skewed": [choices(50, 0.8) for _ in range(group.size)],
        "all to one": [torch.zeros(40, 1, dtype=torch.int64) for _ in range(group.size)],
        "one token each": [choices(1) for _ in range(group.size)],
        "masked": masked,
        "only one rank": [choices(60 if rank == group.size - 1 else 0, 0.5) for rank in range(group.size)],
        "nobody": [choices(0) for _ in range(group.size)],
    }


def all_cases(group: EPGroup) -> None:
    load_E = 2.0 ** -np.arange(NUM_EXPERTS)
    per_rank = -(-NUM_EXPERTS // group.size) + 2
    num_slots = group.size * min(per_rank, NUM_EXPERTS)
    placement = plan(load_E[None], num_slots=num_slots, num_gpus=group.size)
    slot_map = SlotMap.from_placement(placement, 0)
    for method in METHODS.values():
        router = BatchRouter(group, NUM_EXPERTS, method)
        for name, parts in batches(group).items():
            check_batch(group, router, placement, slot_map, parts, f"{method}, {name}", method)
        another = SlotMap.from_placement(Placement(placement.physical_to_logical_map[:, ::-1].copy(), group.size), 0)
        slots = router.slot_idx(0, another, batches(group)["even"][group.rank])  # a new placement of the same layer
        assert torch.equal(another.expert_of_slot_S[slots], batches(group)["even"][group.rank])
        contiguous = SlotMap.contiguous(NUM_EXPERTS, group.size)
        slots = router.slot_idx(1, contiguous, batches(group)["masked"][group.rank])
        assert torch.equal(slots, contiguous.slot_idx(batches(group)["masked"][group.rank]))
        slow = (*[1.0] * (group.size - 1), 0.5)
        router.set_rank_speeds(slow)
        for name in ("even", "skewed", "masked", "only one rank"):
            parts = batches(group)[name]
            check_batch(group, router, placement, slot_map, parts, f"{method}, slow rank, {name}", method, slow)
        router.close()


def check_batch(group, router, placement, slot_map, parts, name, method, speed_N=None) -> None:
    mine = parts[group.rank]
    slot_TK = router.slot_idx(0, slot_map, mine)
    chosen = slot_map.expert_of_slot_S[slot_TK.clamp(min=0)]
    assert torch.equal(torch.where(slot_TK < 0, -1, chosen), mine), name
    used_P = np.bincount(slot_TK[slot_TK >= 0].numpy(), minlength=placement.num_slots)
    count_SE = np.stack([np.bincount(p.reshape(-1).numpy() + 1, minlength=NUM_EXPERTS + 1)[1:] for p in parts])
    num_nodes = router._num_nodes
    table = ReplicaTable.of_layer(
        Placement(placement.physical_to_logical_map, group.size, num_nodes), 0, None if speed_N is None else speed_N
    )
    np.testing.assert_array_equal(used_P, split_batch(table, count_SE, method=method)[group.rank], name)
    load_G = np.sum(group.allgather(used_P), axis=0).reshape(group.size, -1).sum(1)
    if speed_N is not None:
        even_G = split_batch(replace(table, speed_G=np.ones(group.size)), count_SE, method=method).sum(0)
        even_G = even_G.reshape(group.size, -1).sum(1)
        assert load_G[-1] <= even_G[-1] and (load_G / speed_N).max() <= 1.01 * (even_G / speed_N).max() + 1, name
        if group.size > 1 and name.endswith("slow rank, even"):
            assert load_G[-1] < 0.7 * load_G[:-1].max(), (name, load_G)
        return
    by_weight = np.bincount(
        slot_map.slot_idx(torch.cat([p.reshape(-1) for p in parts if p.numel()] or [mine]))
        .clamp(min=-1)
        .numpy()
        .reshape(-1)
        + 1,
        minlength=placement.num_slots + 1,
    )[1:]
    weight_max = by_weight.reshape(group.size, -1).sum(1).max()
    assert load_G.max() <= 1.01 * weight_max + 1, (name, load_G, weight_max)
    fair = -(-int(count_SE.sum()) // group.size)
    if name.endswith("all to one"):  # a token has one choice here, and expert 0 is on every rank that may hold it
        assert load_G.max() <= max(1.02 * fair, -(-count_SE.sum() // placement.replica_count[0, 0])) + 1, load_G
