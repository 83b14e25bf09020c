"""What choosing replicas costs each layer and step, and how even the ranks' load is afterwards.

256 experts, top-8, 288 slots, tokens drawn from a skewed load that differs from rank to rank and batch to batch; the
placement is planned for the average. Times are of one layer on the slowest rank, from the gate's choices to slots:

    weights     each rank by the placement's weights (no communication)
    local       the same totals, nearest replica first
    batch       all ranks' counts exchanged, water-filling (--replica-routing batch)
    batch_lp    the same, exact minimum by maximum flow

split_us: split and assignment alone, without the exchange, which takes as long as the ranks need to meet: tens of
microseconds where each rank has its own core, milliseconds where they share cores.
max_over_mean: the busiest rank's tokens over the mean, averaged over batches; own: tokens that stay on their own rank.
"""

import time

import numpy as np
import torch
from eprt.balancer import Placement, ReplicaTable, assign, plan, split_batch

from benchmarks.tools.report import BenchmarkReport
from benchmarks.tools.timing import Timing
from eprt import EPGroup
from eprt.ep.placement.batch_router import METHODS, BatchRouter
from eprt.ep.placement.slot_map import SlotMap

NUM_RANKS = 4
NUM_EXPERTS, TOP_K, NUM_SLOTS, NUM_BATCHES, WARMUP = 256, 8, 288, 60, 5


def batches(num_tokens: int, rank: int) -> list[torch.Tensor]:
    """A load that all ranks share (lognormal, sigma 0.8), times one of each rank and batch (sigma 0.5)."""
    rng = np.random.default_rng([1, rank])
    parts = []
    for _ in range(NUM_BATCHES + WARMUP):
        logit_E = 0.8 * base() + 0.5 * rng.normal(size=NUM_EXPERTS)
        score_TE = logit_E + rng.gumbel(size=(num_tokens, NUM_EXPERTS))
        parts.append(torch.from_numpy(np.argpartition(-score_TE, TOP_K, axis=1)[:, :TOP_K].copy()))
    return parts


def base() -> np.ndarray:
    return np.random.default_rng(0).normal(size=NUM_EXPERTS)


def run(group: EPGroup, report: BenchmarkReport | None, num_tokens: int) -> None:
    load_LE = np.exp(0.8 * base())[None]
    placement = plan(load_LE, num_slots=NUM_SLOTS, num_gpus=group.size)
    row_S, weight_S = placement.physical_to_logical_map[0], placement.weight_LP[0]
    weights = SlotMap.from_row(row_S, NUM_EXPERTS, weight_S=weight_S, rank=group.rank)
    local = SlotMap.from_row(row_S, NUM_EXPERTS, weight_S=weight_S, rank=group.rank, node_of_rank=group.node_of_rank)
    routers = {name: BatchRouter(group, NUM_EXPERTS, method) for name, method in METHODS.items()}
    sent_L = np.zeros(NUM_EXPERTS + 1, dtype=np.int64)
    candidates = {
        "weights": lambda idx_TK: weights.slot_idx(idx_TK, sent_L),
        "local": lambda idx_TK: local.slot_idx(idx_TK, sent_L),
        **{name: lambda idx_TK, r=router: r.slot_idx(0, weights, idx_TK) for name, router in routers.items()},
    }
    parts = batches(num_tokens, group.rank)
    split_s = {name: split_alone(group, placement, method, parts) for name, method in METHODS.items()}
    seconds = {name: [] for name in candidates}
    uneven, own = {name: [] for name in candidates}, {name: [] for name in candidates}
    for batch, idx_TK in enumerate(parts):
        for name, call in candidates.items():
            slot_TK, taken_s = timed(group, lambda call=call, idx_TK=idx_TK: call(idx_TK))
            rank_A = slot_TK.numpy().reshape(-1) // (NUM_SLOTS // group.size)
            load_N = np.sum(group.allgather(np.bincount(rank_A, minlength=group.size)), axis=0)
            if batch >= WARMUP:
                seconds[name].append(max(group.allgather(taken_s)))
                uneven[name].append(load_N.max() / load_N.mean())
                own[name].append(float((rank_A == group.rank).mean()))
    for router in routers.values():
        router.close()
    for name in candidates:
        own_part = float(np.mean(group.allgather(np.mean(own[name]))))
        if report is not None:
            timing = Timing.from_samples(seconds[name])
            ratio = timing.median_s / Timing.from_samples(seconds["weights"]).median_s
            split_us = float(f"{split_s[name] * 1e6:.4g}") if name in split_s else ""
            report.add_row(
                tokens=num_tokens,
                routing=name,
                **timing.columns("layer"),
                ratio_to_weights=round(ratio, 2),
                split_us=split_us,
                max_over_mean=round(float(np.mean(uneven[name])), 4),
                own=round(own_part, 3),
            )


def split_alone(group: EPGroup, placement: Placement, method: str, parts: list[torch.Tensor]) -> float:
    """Median seconds, the slowest rank's."""
    table, seconds = ReplicaTable.of_layer(placement, 0), []
    for idx_TK in parts:
        count_E = np.bincount(idx_TK.numpy().reshape(-1), minlength=NUM_EXPERTS)
        count_SE = np.array(group.allgather(count_E))

        def split(idx_TK=idx_TK, count_SE=count_SE) -> torch.Tensor:
            quota_P = split_batch(table, count_SE, method=method, source=group.rank)
            return torch.from_numpy(assign(table, idx_TK.numpy(), quota_P, group.rank))

        seconds.append(timed(group, split)[1])
    return max(group.allgather(Timing.from_samples(seconds).median_s))


def timed(group: EPGroup, call):
    group.barrier()
    start = time.perf_counter()
    slot_TK = call()
    return slot_TK, time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    group = EPGroup.from_mpi()
    shape = {"ranks": group.size, "experts": NUM_EXPERTS, "top_k": TOP_K, "slots": NUM_SLOTS, "batches": NUM_BATCHES}
    report = BenchmarkReport("bench_replica_routing", shape) if group.rank == 0 else None
    for num_tokens in (8, 64, 512):
        run(group, report, num_tokens)
    if report is not None:
        report.finish()
    group.close()


if __name__ == "__main__":
    main()
