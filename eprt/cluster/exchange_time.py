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


def card_leg(leg: Leg, nic_GBps: float) -> Leg:
    """leg: of the cards behind the fit."""
    return Leg(leg.start_us, leg.GBps * nic_GBps / _CARD_GBps)


def low_latency(layout: ClusterLayout, model: ModelCost, num_ranks: int, tokens: int) -> list[ExchangeTime]:
    """Each way that there is, fastest first. tokens: of each rank."""
    speed, nic = layout.speed, layout.nic_GBps
    cards = card_leg(_DISPATCH, nic), card_leg(_COMBINE, nic)
    return _every_way(layout, model, num_ranks, tokens, (speed.dispatch, speed.combine), cards, _FORWARD_US)


def normal(layout: ClusterLayout, model: ModelCost, num_ranks: int, tokens: int) -> list[ExchangeTime]:
    """Of large batches: dispatch in fp8, combine in bf16. Each way that there is, fastest first."""
    speed, card = layout.speed, Leg(0.0, _NORMAL_SHARE * layout.nic_GBps)
    inside = Leg(0.0, speed.normal_dispatch_GBps), Leg(0.0, speed.normal_combine_GBps)
    return _every_way(layout, model, num_ranks, tokens, inside, (card, card), forward_us=0.0)


def _every_way(
    layout: ClusterLayout,
    model: ModelCost,
    num_ranks: int,
    tokens: int,
    inside_legs: tuple[Leg, Leg],
    card_legs: tuple[Leg, Leg],
    forward_us: float,
) -> list[ExchangeTime]:
    """Legs: of dispatch and combine. forward_us: of a copy for each node, until it is handed on."""
    dispatch, combine = tokens * model.dispatch_bytes, tokens * model.combine_bytes

    def call_us(legs: tuple[Leg, Leg], copies: float, more_us: float = 0.0) -> tuple[float, float]:
        return legs[0].us(copies * dispatch) + more_us, legs[1].us(copies * combine) + more_us

    # A token goes once to each GPU of a node, whichever node it comes from.
    inside = call_us(inside_legs, parts_elsewhere(model.gate, num_ranks))
    num_nodes = num_ranks // layout.gpus_per_node
    if num_nodes <= 1:
        return [ExchangeTime("nvlink", *inside, "NVLink")]
    times = []
    for way in WAYS:
        copies = copies_over_cards(model.gate, num_nodes, way)
        times.append(_slower(way, call_us(card_legs, copies, forward_us if way == "node" else 0.0), inside))
    return sorted(times, key=lambda each: each.both_us)


def _slower(way: str, outside: tuple[float, float], inside: tuple[float, float]) -> ExchangeTime:
    bound = "NIC" if sum(outside) >= sum(inside) else "NVLink"
    return ExchangeTime(way, max(outside[0], inside[0]), max(outside[1], inside[1]), bound)
