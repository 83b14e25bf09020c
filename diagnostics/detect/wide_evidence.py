"""WideEvidence: the figures and the cause of what is wider than a rank or a link. Decides no finding.

Members that are ranks tell the node's cause; else longer computing does.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ..windows.baseline import Baseline
from .evidence import HIGH_COMPUTE, Evidence, when
from .sightings import Sighting
from .wide import compute_change
from .yardstick import Yardstick

WIDE = ("job", "tier", "node", "path")
_MOST_NAMED = 8


@dataclass(frozen=True)
class WideEvidence:
    """Of one sighting of a kind in WIDE."""

    sighting: Sighting
    wait_us: float  # per call, median over its links
    compute_ratio: float  # of its ranks, over what it was before
    member_causes: Counter  # of members that are ranks or links, by cause
    num_ranks: int
    seen: str  # when, in words

    @staticmethod
    def gather(yardstick: Yardstick, sighting: Sighting, baseline: Baseline | None) -> "WideEvidence":
        matrices, place = yardstick.matrices, sighting.place
        ranks = np.flatnonzero(np.isin(matrices.node_of_rank_N, place.nodes)).tolist()
        members = [Sighting(m, sighting.first, sighting.last, sighting.score, sighting.ratio) for m in sighting.members]
        known = [m for m in members if m.place.kind in ("column", "row", "point")]
        return WideEvidence(
            sighting,
            yardstick.wait_us(sighting),
            compute_change(matrices, baseline, sighting, ranks or list(range(matrices.num_ranks))),
            Counter(Evidence.gather(yardstick, m).cause() for m in known),
            matrices.num_ranks,
            when(matrices, sighting),
        )

    def cause(self) -> str:
        kind = self.sighting.place.kind
        if self.member_causes and kind in ("node", "path"):
            cause = self.member_causes.most_common(1)[0][0]
            return "comm" if kind == "path" and cause == "comp" else cause
        return "comp" if kind in ("job", "node") and self.compute_ratio >= HIGH_COMPUTE else "comm"

    def text(self) -> str:
        kind, nodes, tier = self.sighting.place.kind, self.sighting.place.nodes, self.sighting.place.tier
        than = "before" if self.sighting.is_change else "their peers"
        what = {
            "job": "all ranks wait",
            "tier": f"waits {tier} are",
            "node": f"the others wait for the ranks of node {nodes[0] if nodes else ''}",
            "path": f"waits between nodes {' and '.join(map(str, nodes))} are",
        }[kind]
        text = f"{what} {self.sighting.ratio:.2g}x as long as {than} ({self.wait_us:.0f} us per call) {self.seen}"
        text += f"; of the usual, {'these' if nodes else 'the'} ranks compute {self.compute_ratio:.2g}x"
        return text + self._members_text()

    def _members_text(self) -> str:
        ranks = [m.rank for m in self.sighting.members if m.rank is not None]
        if ranks:
            more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
            of = f" of {self.num_ranks}" if self.sighting.place.kind == "job" else ""
            return f"; {len(ranks)}{of} ranks: {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"
        links = [m for m in self.sighting.members if m.kind == "point"]
        return f"; {len(links)} links" if links else ""
