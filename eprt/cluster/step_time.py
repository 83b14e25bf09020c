"""Times of a decode step and of a prompt, by the kernels' speeds and the exchange.

A step is the sum over layers of attention, products, experts, exchange and what is none of these (GpuSpeed.other). With
overlap the batch is cut in two, and the exchange of one half runs beside the kernels of the other; every half reads all
weights. The shorter of both is taken.
"""

from dataclasses import dataclass, replace

from eprt.cluster.cluster_layout import ClusterLayout, require_between
from eprt.cluster.crossings import experts_touched
from eprt.cluster.exchange_time import ExchangeTime, low_latency, normal
from eprt.cluster.model_cost import ModelCost

_HALVES_COST = 0.094  # of a prompt's kernels, when its tokens are cut in two: layer_prefill_2gpu.json, 16384 tokens


@dataclass(frozen=True)
class Workload:
    requests: int = 128  # of a GPU that decodes
    prompt: int = 4096  # tokens
    output: int = 1024
    prefill_tokens: int = 8192  # of a GPU and step that computes prompts
    accepted: float = 1.0  # tokens of a request and step; above 1 with drafts

    def __post_init__(self):
        for flag, value in (("--requests", self.requests), ("--prompt", self.prompt), ("--output", self.output)):
            require_between(flag, value, 1)
        require_between("--prefill-tokens", self.prefill_tokens, 1)
        require_between("--accepted", self.accepted, 1)  # the token that a step gives anyway

    @property
    def context(self) -> float:
        """Mean length while it decodes."""
        return self.prompt + self.output / 2

    def with_requests(self, requests: int) -> "Workload":
        return replace(self, requests=requests)


@dataclass(frozen=True)
class DecodeStep:
    """Milliseconds of a step of the whole model."""

    compute_ms: float
    exchange_ms: float
    step_ms: float
    exchange: ExchangeTime


def decode_step(
    layout: ClusterLayout, model: ModelCost, num_ranks: int, slots_per_rank: float, work: Workload
) -> DecodeStep:
    """slots_per_rank: places of experts of a rank and layer."""
    exchange = low_latency(layout, model, num_ranks, work.requests)[0]
    compute = _compute_us(layout, model, num_ranks, slots_per_rank, work, work.requests)
    sent = model.num_moe_layers * exchange.both_us
    half = -(-work.requests // 2)
    halves = 2 * _compute_us(layout, model, num_ranks, slots_per_rank, work, half)
    halves_sent = 2 * model.num_moe_layers * low_latency(layout, model, num_ranks, half)[0].both_us
    compute_ms, sent_ms = compute * 1e-3, sent * 1e-3
    return DecodeStep(compute_ms, sent_ms, min(compute_ms + sent_ms, max(halves, halves_sent) * 1e-3), exchange)


def _compute_us(
    layout: ClusterLayout, model: ModelCost, num_ranks: int, slots_per_rank: float, work: Workload, rows: int
) -> float:
    """All kernels of a step but the exchange's, for `rows` requests of each rank."""
    speed, config = layout.speed, model.config

    def linear_us(values: int, itemsize: float = model.dense_itemsize) -> float:
        return speed.linear_us(values * itemsize, 2.0 * rows * values)

    attention = speed.attention_us(
        rows * work.context * model.cache_bytes / config.num_hidden_layers, rows * model.attention_flops(work.context)
    )
    touched = experts_touched(model.gate, slots_per_rank, rows * num_ranks, slots_per_rank * num_ranks)
    experts = speed.expert_us(touched * model.expert_bytes, 2.0 * rows * model.moe.top_k * model.expert_values)
    every_layer = attention + linear_us(model.attention_values) + rows * speed.other_us_per_request
    head = linear_us(config.vocab_size * config.hidden_size, itemsize=2)
    return (
        config.num_hidden_layers * every_layer
        + model.num_moe_layers * (linear_us(model.shared_values) + experts)
        + config.first_k_dense_replace * linear_us(model.dense_values)
        + head
    )


def prefill_tokens_per_s(layout: ClusterLayout, model: ModelCost, num_ranks: int, work: Workload) -> float:
    """Of a GPU."""
    layers, tokens = model.config.num_hidden_layers, work.prefill_tokens
    compute = layers * tokens * model.prompt_flops(work.prompt / 2) / layout.speed.prompt_tflops * 1e-6
    sent = model.num_moe_layers * normal(layout, model, num_ranks, tokens)[0].both_us
    return tokens / min(compute + sent, max((1 + _HALVES_COST) * compute, sent)) * 1e6
