"""balance_traffic: copies of tokens that cross between nodes, by how much balance the plan may give up for fewer."""

import time
from collections.abc import Iterator, Sequence

import numpy as np
from eprt.balancer import RoutingTrace, plan, traffic_per_token
from eprt.balancer.loads import LoadFile
from eprt.balancer.replay import halves

from benchmarks.balancing.clusters import EXPERTS, LAYERS, clusters_for, demo_clusters, eplb_placement, skew
from benchmarks.balancing.synthetic_load import topic_trace
from benchmarks.tools.report import BenchmarkReport

DRAWN = 4  # layers of traces, repeated to make up the model: the same work for the planner
SAMPLE = 8192  # tokens of each layer whose routing is known
ALLOWANCES = (0.0, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2)
ANY_BALANCE = 9.0  # bounded by the slots alone: all that the search finds to save

# Load [L, E] of many tokens, and the routing of some, as a server has them.
Seen = tuple[np.ndarray, RoutingTrace]


def topic_traces() -> Iterator[tuple[str, Seen, Seen]]:
    """(name, what to plan with, what to judge on: other tokens)"""
    for name, strength in (("topics strong", 1.5), ("topics weak", 0.7), ("no topics", 0.0)):
        shape = dict(num_groups=8, top_groups=4, strength=strength, skew=0.5)
        traces = [topic_trace(DRAWN, 4 * SAMPLE, EXPERTS, 8, token_seed=seed, **shape) for seed in (0, 1)]
        repeated = np.arange(LAYERS) % DRAWN
        sampled = [RoutingTrace(tuple(one.topk_idx[layer][:SAMPLE] for layer in repeated)) for one in traces]
        seen, unseen = ((one.load(EXPERTS)[repeated], some) for one, some in zip(traces, sampled))
        yield name, seen, unseen


def bench_traffic(report: BenchmarkReport, name: str, given: Seen, other: Seen, shapes: Sequence[dict]) -> None:
    (load_LE, seen), (unseen_LE, unseen) = given, other
    for options in shapes:
        options.pop("num_experts")
        eplb = eplb_placement(load_LE, options)
        eplb_skew, eplb_copies = skew(eplb, unseen_LE), traffic_per_token(eplb, unseen).mean()
        candidates = {"eplb": (eplb, 0.0)}
        for allowance in (*ALLOWANCES, ANY_BALANCE):
            start = time.process_time()
            found = plan(load_LE, **options, coactivation=seen, balance_allowance=allowance)
            name_of_it = "any balance" if allowance == ANY_BALANCE else f"affinity {allowance:g}"
            candidates[name_of_it] = (found, (time.process_time() - start) * 1e3)
        for policy, (placement, cpu_ms) in candidates.items():
            copies = traffic_per_token(placement, unseen).mean()
            report.add_row(
                trace=name,
                nodes=options["num_nodes"],
                policy=policy,
                skew_planned=skew(placement, load_LE),
                skew_unseen=skew(placement, unseen_LE),
                node_copies=float(copies),
                fewer_copies=float(1 - copies / eplb_copies),
                balance_to_eplb=float(skew(placement, unseen_LE) / eplb_skew),
                expert_messages=float(traffic_per_token(placement, unseen, "expert_messages").mean()),
                cpu_ms=cpu_ms,
            )


def bench_traffics(report: BenchmarkReport, recorded: LoadFile) -> None:
    for name, seen, unseen in topic_traces():
        bench_traffic(report, name, seen, unseen, clusters_for(EXPERTS, 8, (2, 4, 8), 8))
    assert recorded.trace is not None
    seen, unseen = halves(recorded.trace.without_sources())
    even_LE, odd_LE = recorded.load_WLE[::2].sum(0), recorded.load_WLE[1::2].sum(0)
    bench_traffic(report, "demo model", (even_LE, seen), (odd_LE, unseen), demo_clusters(recorded))
