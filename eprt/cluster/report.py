"""A ClusterPlan as text for the terminal, and as JSON."""

from collections.abc import Sequence
from typing import Any

from eprt.cluster.cluster_plan import ClusterPlan, ClusterRow
from eprt.cluster.exchange_time import ExchangeTime

_NOTE = (
    "Predicted, not measured: times between nodes come from DeepEP V1's published ones, times inside a node and of "
    "kernels from one host. docs/cluster-planner.md says how far each was checked."
)


def text(plan: ClusterPlan, rows: Sequence[ClusterRow]) -> str:
    layout, work = plan.layout, plan.work
    head = (
        f"{layout.num_nodes} nodes of {layout.gpus_per_node} GPUs ({layout.speed.name}), {layout.nic_GBps:g} GB/s of "
        f"network a GPU; {work.prompt} tokens in, {work.output} out, {work.requests} requests a GPU"
    )
    tables = [_exchange_table(rows), _speed_table(plan, rows), _memory_table(rows)]
    return "\n\n".join([head, *tables, _NOTE])


def to_json(plan: ClusterPlan, rows: Sequence[ClusterRow]) -> dict[str, Any]:
    layout = plan.layout
    config = {"nodes": layout.num_nodes, "gpus_per_node": layout.gpus_per_node, "nic_GBps": layout.nic_GBps}
    work = {name: getattr(plan.work, name) for name in ("requests", "prompt", "output", "prefill_tokens", "accepted")}
    head = {**config, "gpu": layout.gpu, **work, "redundant_experts": plan.redundant}
    return {"predicted": True, "note": _NOTE, "config": head, "rows": [row.to_json() for row in rows]}


def _exchange_table(rows: Sequence[ClusterRow]) -> str:
    lines = ["Exchange of a layer, us          low latency (of a decode step)            normal (of a prompt's step)"]
    lines.append("group   nodes   dispatch  combine  way     bound     other way   dispatch  combine  way     bound")
    for row in rows:
        best, large = row.low_latency[0], row.normal[0]
        other = f"{row.low_latency[1].both_us:9.0f}" if len(row.low_latency) > 1 else "        -"
        lines.append(f"EP{row.num_ranks:<5} {row.num_nodes:5}   {_exchange(best)}   {other}   {_exchange(large)}")
    return "\n".join(lines)


def _exchange(time: ExchangeTime) -> str:
    return f"{time.dispatch_us:8.0f} {time.combine_us:8.0f}  {time.way:7} {time.bound:7}"


def _speed_table(plan: ClusterPlan, rows: Sequence[ClusterRow]) -> str:
    price = "   USD per million output tokens" if plan.usd_per_gpu_hour else ""
    lines = [
        "Speed of a GPU            step, ms   of it exchange   decode tokens/s   prefill tokens/s   prefill : decode"
    ]
    lines[0] += price
    for row in rows:
        name = f"EP{row.num_ranks:<5} {row.requests:4} requests"
        if row.step is None:
            lines.append(f"{name}   the weights leave no room for a request of this length")
            continue
        line = (
            f"{name}         {row.step.step_ms:8.1f}   {row.step.exchange_ms:14.1f}   {row.decode_tokens_per_s:15.0f}"
        )
        line += f"   {row.prefill_tokens_per_s:16.0f}   {row.prefill_per_decode:16.2f}"
        if row.usd_per_million_output is not None:
            line += f"   {row.usd_per_million_output:29.2f}"
        lines.append(line)
    return "\n".join(lines)


def _memory_table(rows: Sequence[ClusterRow]) -> str:
    lines = ["Memory of a GPU, GB     weights   experts   slots a layer   cached tokens   slots to live without a node"]
    for row in rows:
        need = row.memory
        without = "no other node" if need.slots_without_a_node is None else f"{need.slots_without_a_node}"
        lines.append(
            f"EP{row.num_ranks:<18} {need.dense_gb:10.1f}   {need.experts_gb:7.1f}   {need.slots:13}   "
            f"{need.cached_tokens:13}   {without}, {need.slots_with_every_expert_twice} with no copying"
        )
    return "\n".join(lines)
