"""ClusterPlan: one row for each size of the expert-parallel group, with all that is predicted of it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from eprt.cluster.cluster_layout import ClusterLayout, require_between
from eprt.cluster.exchange_time import ExchangeTime, low_latency, normal
from eprt.cluster.memory_need import MemoryNeed, memory_need
from eprt.cluster.model_cost import ModelCost
from eprt.cluster.step_time import DecodeStep, Workload, decode_step, prefill_tokens_per_s
from eprt.config import require


@dataclass(frozen=True)
class ClusterRow:
    """Of groups of num_ranks GPUs. Speeds are of one GPU."""

    num_ranks: int
    num_nodes: int
    num_groups: int  # that the cluster holds
    low_latency: list[ExchangeTime]  # each way, fastest first
    normal: list[ExchangeTime]
    memory: MemoryNeed
    requests: int  # that decode on a GPU: as asked for, or as many as fit
    step: DecodeStep | None  # None where the weights do not fit
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    prefill_per_decode: float  # GPUs that compute prompts for each one that decodes
    usd_per_million_output: float | None  # of a GPU's price, prompts included

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ClusterPlan:
    layout: ClusterLayout
    model: ModelCost
    work: Workload
    redundant: int = 0  # experts held twice, in each layer
    usd_per_gpu_hour: float | None = None

    def __post_init__(self):
        require_between("--redundant-experts", self.redundant, 0)
        price = self.usd_per_gpu_hour
        require(price is None or price > 0, f"--price {price}: must be above 0")
        require_between("--price", price or 1, 0)

    def rows(self) -> Iterator[ClusterRow]:
        for num_ranks in self.layout.group_sizes():
            if num_ranks <= self.model.moe.num_experts + self.redundant:
                yield self.row(num_ranks)

    def row(self, num_ranks: int) -> ClusterRow:
        layout, model, work = self.layout, self.model, self.work
        memory = memory_need(layout, model, num_ranks, self.redundant)
        requests = min(work.requests, int(memory.cached_tokens // (work.prompt + work.output)))
        step, decode, prefill, ratio = None, 0.0, 0.0, 0.0
        if requests:
            step = decode_step(layout, model, num_ranks, memory.slots, work.with_requests(requests))
            decode = requests * work.accepted / step.step_ms * 1e3
            prefill = prefill_tokens_per_s(layout, model, num_ranks, work)
            ratio = (work.prompt / prefill) / (work.output / decode)
        return ClusterRow(
            num_ranks=num_ranks,
            num_nodes=num_ranks // layout.gpus_per_node,
            num_groups=layout.num_gpus // num_ranks,
            low_latency=low_latency(layout, model, num_ranks, requests or work.requests),
            normal=normal(layout, model, num_ranks, work.prefill_tokens),
            memory=memory,
            requests=requests,
            step=step,
            decode_tokens_per_s=decode,
            prefill_tokens_per_s=prefill,
            prefill_per_decode=ratio,
            usd_per_million_output=self._cost(decode, ratio),
        )

    def _cost(self, decode_tokens_per_s: float, prefill_per_decode: float) -> float | None:
        if self.usd_per_gpu_hour is None or not decode_tokens_per_s:
            return None
        return self.usd_per_gpu_hour * (1 + prefill_per_decode) / (decode_tokens_per_s * 3600) * 1e6
