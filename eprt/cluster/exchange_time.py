"""Times of dispatch and combine by size of the group, low latency and normal, between nodes and inside.

Between nodes a call costs the network card's time: start + bytes / (share of its speed). Start and share are fitted to
the ten times that DeepEP V1 published for 128 tokens on cards of 50 GB/s with NVLink inside nodes (README at de8cfca);
the twelve without NVLink (at 1a0c8f6) were not fitted. Nothing of eprt has run on a network yet. Inside a node the legs
of GpuSpeed hold. Both run side by side, so the slower one counts.

Ways to send a token between nodes: `expert`, a copy for each of its experts there, straight to the expert's GPU;
`node`, one copy for each node, which a GPU there hands on.
"""

from dataclasses import dataclass

from eprt.cluster.cluster_layout import ClusterLayout
from eprt.cluster.crossings import ExpertChoice, experts_elsewhere, parts_elsewhere
from eprt.cluster.gpu_speed import Leg
from eprt.cluster.model_cost import ModelCost

WAYS = ("expert", "node")

_CARD_GBps = 50.0  # of the cards behind the fit
_DISPATCH, _COMBINE = Leg(34.6, 46.4), Leg(5.7, 39.9)
_FORWARD_US = 6.0  # until a GPU has handed on what came for its node; assumed
_NORMAL_SHARE = 0.9  # of the card, 43 to 45 of 50 GB/s in DeepEP V1, V2 and HybridEP


@dataclass(frozen=True)
class ExchangeTime:
    """Microseconds of one call each, and what bounds the dispatch and the combine together."""

    way: str  # "nvlink" inside a node, else one of WAYS
    dispatch_us: float
    combine_us: float
    bound: str  # "NIC" or "NVLink"

    @property
    def both_us(self) -> float:
        return self.dispatch_us + self.combine_us


def copies_over_cards(gate: ExpertChoice, num_nodes: int, way: str) -> float:
    """Of a token, in the mean."""
    return parts_elsewhere(gate, num_nodes) if way == "node" else experts_elsewhere(gate, num_nodes)


def low_latency_card_us(leg: Leg, nic_GBps: float, num_bytes: float) -> float:
    return Leg(leg.start_us, leg.GBps * nic_GBps / _CARD_GBps).us(num_bytes)


def low_latency(layout: ClusterLayout, model: ModelCost, num_ranks: int, tokens: int) -> list[ExchangeTime]:
    """Each way that there is, fastest first. tokens: of each rank."""
    dispatch, combine = tokens * model.dispatch_bytes, tokens * model.combine_bytes
    inside = _low_latency_inside(layout, model, num_ranks, tokens)
    num_nodes = num_ranks // layout.gpus_per_node
    if num_nodes <= 1:
        return [ExchangeTime("nvlink", *inside, "NVLink")]
    times = []
    for way in WAYS:
        copies, forward = copies_over_cards(model.gate, num_nodes, way), _FORWARD_US if way == "node" else 0.0
        outside = (
            low_latency_card_us(_DISPATCH, layout.nic_GBps, copies * dispatch) + forward,
            low_latency_card_us(_COMBINE, layout.nic_GBps, copies * combine) + forward,
        )
        times.append(_slower(way, outside, inside))
    return sorted(times, key=lambda each: each.both_us)


def normal(layout: ClusterLayout, model: ModelCost, num_ranks: int, tokens: int) -> list[ExchangeTime]:
    """Of large batches: dispatch in fp8, combine in bf16. Each way that there is, fastest first."""
    dispatch, combine = tokens * model.dispatch_bytes, tokens * model.combine_bytes
    copies = parts_elsewhere(model.gate, num_ranks)
    speed, num_nodes = layout.speed, num_ranks // layout.gpus_per_node
    inside = (
        copies * dispatch / speed.normal_dispatch_GBps * 1e-3,
        copies * combine / speed.normal_combine_GBps * 1e-3,
    )
    if num_nodes <= 1:
        return [ExchangeTime("nvlink", *inside, "NVLink")]
    card = Leg(0.0, _NORMAL_SHARE * layout.nic_GBps)
    times = []
    for way in WAYS:
        crossing = copies_over_cards(model.gate, num_nodes, way)
        times.append(_slower(way, (card.us(crossing * dispatch), card.us(crossing * combine)), inside))
    return sorted(times, key=lambda each: each.both_us)


def _low_latency_inside(layout: ClusterLayout, model: ModelCost, num_ranks: int, tokens: int) -> tuple[float, float]:
    """A token goes once to each GPU, whichever node it comes from."""
    copies = tokens * parts_elsewhere(model.gate, num_ranks)
    legs = layout.speed.dispatch, layout.speed.combine
    return legs[0].us(copies * model.dispatch_bytes), legs[1].us(copies * model.combine_bytes)


def _slower(way: str, outside: tuple[float, float], inside: tuple[float, float]) -> ExchangeTime:
    bound = "NIC" if sum(outside) >= sum(inside) else "NVLink"
    return ExchangeTime(way, max(outside[0], inside[0]), max(outside[1], inside[1]), bound)
