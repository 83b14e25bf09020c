"""The cluster planner's prediction of an exchange between nodes, for a card whose speed is known.

Knows no measurement.
"""

from dataclasses import dataclass

from eprt.cluster.crossings import ExpertChoice
from eprt.cluster.exchange_time import copies_over_cards
from eprt.cluster.gpu_speed import Leg
from eprt.ep.wire.options import WireOptions
from eprt.network_cards import read_network_cards

_BYTES_PER_BIT = 1 / 8


@dataclass(frozen=True)
class InternodeCase:
    """One exchange: every rank sends `tokens` tokens, a copy of each to every other node that holds experts of it."""

    num_nodes: int
    gate: ExpertChoice
    tokens: int  # of each rank
    hidden: int

    @property
    def sent_tokens(self) -> float:
        """Copies that leave a rank, in the mean."""
        return self.tokens * copies_over_cards(self.gate, self.num_nodes, "node")

    @property
    def bytes_each_way(self) -> float:
        """Of a rank's tokens, and of the sums that come back, in bf16."""
        return self.sent_tokens * self.hidden * 2


def card_leg(wire: WireOptions, nic_GBps: float | None) -> Leg | None:
    """What a rank's card takes for a message: of the paced wire as it is set, else of a card of this speed."""
    if wire.kind == "paced":
        return Leg(wire.latency_us, wire.gbps) if wire.gbps else None
    return None if nic_GBps is None else Leg(0.0, nic_GBps)


def fastest_card_GBps() -> float | None:
    """Of this host; None where no driver tells."""
    speeds = [port.gbps for port in read_network_cards().ports if port.is_up and port.gbps]
    return max(speeds) * _BYTES_PER_BIT if speeds else None
