"""balance_drift: bytes moved by every policy while the load drifts, and the balance of the window after."""

import itertools
from collections.abc import Callable

import numpy as np
from eprt.balancer import Placement, aligned, moved_slots, plan
from eprt.balancer.commands.options import DEEPSEEK_V3_EXPERT_BYTES
from eprt.balancer.loads import LoadFile
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from benchmarks.balancing.clusters import CLUSTERS, EXPERTS, LAYERS, demo_clusters, eplb_placement, options_of
from benchmarks.balancing.synthetic_load import drifting_load
from benchmarks.tools.report import BenchmarkReport

MOVES = (1, 2, 4, 8, 32, 48, 64)  # per layer and plan


def bench_drifts(report: BenchmarkReport, recorded: LoadFile) -> None:
    drifting = drifting_load(12, LAYERS, EXPERTS, seed=1)
    for cluster in CLUSTERS:
        bench_drift(report, f"drifting, {cluster}", drifting, options_of(cluster), DEEPSEEK_V3_EXPERT_BYTES)
    for options in demo_clusters(recorded):
        options.pop("num_experts")
        name = f"demo model, {options['num_nodes']} nodes"
        bench_drift(report, name, recorded.load_WLE, options, DEEPSEEK_V3_EXPERT_BYTES)


def bench_drift(
    report: BenchmarkReport, name: str, load_WLE: np.ndarray, options: dict[str, int], expert_bytes: int
) -> None:
    """Every policy starts from the plan for window 0 and is judged on the window after the one it plans for."""
    first = plan(load_WLE[0], **options)
    policies: dict[str, Callable[[np.ndarray, Placement], Placement]] = {
        "static": lambda load, current: current,
        "eplb": lambda load, current: eplb_placement(load, options),
        "scratch": lambda load, current: plan(load, **options),
        "scratch, aligned": lambda load, current: aligned(plan(load, **options), current),
        **{
            f"incremental {moves}": lambda load, current, moves=moves: plan(
                load, current=current, max_moves_per_layer=moves, **options
            )
            for moves in MOVES
        },
        # One slot of the whole model, in the layer where it helps most: enough for small models.
        "incremental, 1 in all": lambda load, current: plan(
            load, current=current, max_bytes=1, bytes_per_expert=1, **options
        ),
    }
    moved: dict[str, int] = {}
    for policy, step in policies.items():
        current = eplb_placement(load_WLE[0], options) if policy == "eplb" else first
        skews, ratios, moves = [], [], 0
        for window in range(1, len(load_WLE) - 1):
            after = step(load_WLE[window], current)
            moves += int(moved_slots(current, after).sum())
            load_LG = after.gpu_load(load_WLE[window + 1])
            skews.append(float((load_LG.max(1) / load_LG.mean(1)).mean()))
            ratios.append(float((load_LG.mean(1) / load_LG.max(1)).mean()))
            current = after
        moved[policy] = moves
        num_plans = len(skews)
        report.add_row(
            trace=name,
            policy=policy,
            skew_next=float(np.mean(skews)),
            mean_over_max=float(np.mean(ratios)),
            mean_over_max_worst=float(np.min(ratios)),
            slots_moved_share=moves / num_plans / (first.num_layers * first.num_slots),
            gb_per_gpu_and_plan=moves / num_plans * expert_bytes / 1e9 / options["num_gpus"],
            fewer_bytes_than_eplb=moved["eplb"] / moves if moves and "eplb" in moved else "",
        )
    pairs = list(itertools.pairwise(load_WLE[1:]))
    least = sum(slots_needed(before, after, options) for before, after in pairs) / len(pairs)
    report.add_row(
        trace=name,
        policy="least",
        slots_moved_share=least / (first.num_layers * first.num_slots),
        gb_per_gpu_and_plan=least * expert_bytes / 1e9 / options["num_gpus"],
        fewer_bytes_than_eplb=moved["eplb"] / len(pairs) / least if least else "",
    )


def slots_needed(before_LE: np.ndarray, after_LE: np.ndarray, options: dict[str, int]) -> int:
    """How many slots of a plan for `before` must change at the least until it is as even for `after` as EPLB's.

    GPUs that share experts, directly or through others, are one island: whatever slot weights do, its load stays there.
    An island whose busiest GPU is above EPLB's under the best weights must send at least one of its experts to a slot
    (in another island, or of its own): what only comes in takes none of its load away. A slot receives one expert, and
    an expert is of one island, so no slot serves two.
    """
    placement = plan(before_LE, **options)
    slots_LP = placement.physical_to_logical_map
    load_LG = plan(after_LE, current=placement, max_moves_per_layer=0, **options).gpu_load(after_LE)  # best weights
    level_L = eplb_placement(after_LE, options).gpu_load(after_LE).max(1)
    needed = 0
    for slots_P, load_G, level in zip(slots_LP, load_LG, level_L):
        num_gpus, num_slots = len(load_G), len(slots_P)
        gpu_P = np.arange(num_slots) // (num_slots // num_gpus)
        nodes = num_gpus + int(slots_P.max()) + 1
        edges = coo_matrix((np.ones(num_slots), (gpu_P, num_gpus + slots_P)), shape=(nodes, nodes))
        island_G = connected_components(edges, directed=False)[1][:num_gpus]
        needed += len(np.unique(island_G[load_G > level * (1 + 1e-3)]))
    return needed
