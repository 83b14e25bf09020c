"""One rank of bench_affinity: serves the same questions under two plans in turns, and counts what crosses.

python -m benchmarks.balancing.affinity_rank '{"groups": [["HOST:PORT", "paced:gbps=25", null]], "rank": 0, ...}'
"""

import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from eprt.balancer import Placement, RoutingTrace, plan, traffic_per_token
from eprt.balancer.job import PlanRequest, solve

from benchmarks.balancing.clusters import skew
from benchmarks.balancing.topic_requests import FullEngine, TopicQuestions
from benchmarks.ep.wire_rank import CountingGroup, run_rank
from benchmarks.shapes import DEMO_MODEL
from benchmarks.tools.timing import Timing, quantile
from eprt.bind import bind
from eprt.config import EngineConfig
from eprt.engine.engine import Engine
from eprt.engine.tokenizer import Tokenizer
from eprt.ep.group.group import EPGroup
from eprt.ep.migration.job import MigrationJob

PLANS = ("balance", "affinity")
_OPTIONS = {"kv_cache_gb": 0.05, "enable_prefix_cache": False, "replica_routing": "local"}
_WARM_STEPS = 4  # of each window: prompts of the first questions


@dataclass
class Served:
    """One engine under one plan, and the samples of its windows, a number for each; those of all ranks together."""

    full: FullEngine
    group: CountingGroup
    step_s: list[float] = field(default_factory=list)  # a step's, the slowest rank's
    step_bytes: list[float] = field(default_factory=list)  # that a rank gives to the wire in a step, the mean
    step_tokens: list[float] = field(default_factory=list)  # that a rank computes in a step, the mean

    def window(self, questions: TopicQuestions, num_steps: int) -> None:
        self.full.begin(questions)
        for _ in range(_WARM_STEPS):
            self.full.step()
        self.group.start_together()
        before, start_s = self.group.sent_bytes, time.perf_counter()
        num_tokens = sum(self.full.step() for _ in range(num_steps))
        taken = time.perf_counter() - start_s, self.group.sent_bytes - before, num_tokens
        everyones = np.array(self.group.allgather(taken)) / num_steps
        self.step_s.append(float(everyones[:, 0].max()))
        self.step_bytes.append(float(everyones[:, 1].mean()))
        self.step_tokens.append(float(everyones[:, 2].mean()))


def measure(groups: list[CountingGroup], case: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each group. What plans are made from, and what they are judged on, are questions of their own."""
    bind("core", groups[0].allgather)
    tokenizer, rank = Tokenizer(DEMO_MODEL), groups[0].rank
    served = {
        (i, name): Served(FullEngine(_engine(group, case["redundant"]), case["requests"]), group)
        for i, group in enumerate(groups)
        for name in PLANS
    }
    first = served[0, PLANS[0]]
    seen = _observe(first, TopicQuestions(tokenizer, f"seen {rank}", held_out=False), case["seen_steps"])
    start = _placement(first)
    plans = _make_plans(start, *seen)
    for (_, name), one in served.items():
        _migrate(one, plans[name])
    for turn in range(case["turns"]):
        for i, name in sorted(served, reverse=turn % 2 == 1):
            questions = TopicQuestions(tokenizer, f"unseen {rank} {turn}", held_out=True)
            served[i, name].window(questions, case["steps"])
    unseen = _counted(first)
    judged = {name: _judge(one, unseen[0] - seen[0], unseen[1]) for name, one in ({"start": start} | plans).items()}
    rows = [_row(*(served[i, name] for name in PLANS), judged) for i in range(len(groups))]
    for one in served.values():
        one.full.engine.close()
    return rows


def _engine(group: EPGroup, num_redundant: int) -> Engine:
    return Engine(EngineConfig(str(DEMO_MODEL), num_redundant_experts=num_redundant, **_OPTIONS), group)


def _placement(one: Served) -> Placement:
    """That serves."""
    migrator = one.full.engine.migrator
    assert migrator is not None
    return Placement(np.array(migrator.rows), one.group.size, one.group.num_nodes)


def _observe(one: Served, questions: TopicQuestions, num_steps: int) -> tuple[np.ndarray, RoutingTrace]:
    one.full.begin(questions)
    for _ in range(num_steps):
        one.full.step()
    return _counted(one)


def _counted(one: Served) -> tuple[np.ndarray, RoutingTrace]:
    """Load [L, E] of all ranks since the start, and the routing of the tokens that were sampled last."""
    recorder = one.full.engine.recorder
    assert recorder is not None
    everyones = one.group.allgather((recorder.tokens_PLE.sum(0), recorder.sample()))
    source_T = np.concatenate([np.full(sample.shape[1], rank) for rank, (_, sample) in enumerate(everyones)])
    topk_LTK = np.concatenate([sample for _, sample in everyones], axis=1).astype(np.int32)
    trace = RoutingTrace(tuple(topk_LTK), tuple([source_T.astype(np.int32)] * len(topk_LTK)))
    return sum(load_LE for load_LE, _ in everyones), trace


def _make_plans(serves: Placement, load_LE: np.ndarray, trace: RoutingTrace) -> dict[str, Placement]:
    """Of the same load and slots. Balance alone keeps the gate's groups together where a node's GPUs have no more slots
    than experts of its groups."""
    shape = {"num_slots": serves.num_slots, "num_gpus": serves.num_gpus, "num_nodes": serves.num_nodes}
    with_topics = {"balance": None, "affinity": trace.without_sources()}
    fits = serves.num_slots_per_gpu <= serves.num_experts // serves.num_nodes
    groups = {"num_groups": _NUM_GROUPS if fits else 1, "threads": 1}
    return {name: plan(load_LE, **shape, **groups, coactivation=with_topics[name]) for name in PLANS}


_NUM_GROUPS = 4  # of the demo model's gate, which takes experts of two


def _migrate(one: Served, target: Placement) -> None:
    """As a server does it, between steps that go on."""
    answer = solve(PlanRequest(_placement(one), target=target, node_of_gpu=one.group.node_of_rank))
    migrator = one.full.engine.migrator
    assert migrator is not None
    migrator.offer(MigrationJob(1, 0, answer.rounds, answer.weights))
    while migrator.active:
        one.full.engine.step()
    state = migrator.status()
    if state.state != "done" or migrator.rows != target.physical_to_logical_map.tolist():
        raise ValueError(f"the plan's migration ended as {state.state}: {state.reason}")


def _judge(one: Placement, load_LE: np.ndarray, trace: RoutingTrace) -> tuple[float, float]:
    """The planner's own view: busiest rank over the mean, and a token's copies to other nodes, in a layer."""
    return skew(one, load_LE), float(traffic_per_token(one, trace).mean())


def _row(balance: Served, affinity: Served, judged: dict[str, tuple[float, float]]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, (skewed, copies) in judged.items():
        columns |= {f"{name}_skew": skewed, f"{name}_copies": copies}
    for name, one in zip(PLANS, (balance, affinity)):
        columns[f"{name}_kB"] = float(np.mean(one.step_bytes)) / 1e3
        columns |= Timing.from_samples(one.step_s).columns(f"{name}_step", "ms")
    columns["tokens"] = float(np.mean(balance.step_tokens + affinity.step_tokens))
    of_both = {"bytes": (affinity.step_bytes, balance.step_bytes), "time": (affinity.step_s, balance.step_s)}
    for what, (of_affinity, of_balance) in of_both.items():
        ratios = sorted(with_it / without for with_it, without in zip(of_affinity, of_balance))
        for suffix, q in (("", 0.5), ("_p10", 0.1), ("_p90", 0.9)):
            columns[f"{what}_ratio{suffix}"] = quantile(ratios, q)
    return columns


if __name__ == "__main__":
    sys.exit(run_rank(measure))
