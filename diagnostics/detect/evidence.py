"""Evidence: the figures of a sighting, its cause, and what to do about it. Does not decide whether it is a finding.

A rank that computes too long arrives late, so others wait for it while it waits for nobody: its column is high, its row
low. A rank whose messages are late gets its answers late too: its row is not low. A wait that grows with the tokens is
caused by the load, not by the network.
"""

import math
from dataclasses import dataclass

from ..windows.matrices import WindowMatrices
from .held_back import HeldBack
from .sightings import Sighting
from .yardstick import Yardstick

HIGH_COMPUTE, LOW_COMPUTE = 1.25, 0.8
LOW_ROW, LOW_ROW_Z = 0.93, -2.5
SPARED, SHARES_IT = 0.5, 0.2  # parts of the others' extra wait: a late rank is spared more, a late sender less
COMPUTE_EXPLAINS = 0.5  # of the others' extra wait
HIGH_TOKENS, TOKENS_EXPLAIN = 1.3, 0.5  # of the wait's logarithm


@dataclass(frozen=True)
class Evidence:
    """Ratios are to the median rank (for tokens of a point: to the median pair)."""

    sighting: Sighting
    wait_us: float  # per call
    row_ratio: float  # of a column's own row
    row_z: float
    compute_ratio: float
    compute_share: float  # the part of the longer wait that longer computing makes up
    token_ratio: float
    blocked_ratio: float  # of a column, see Yardstick.blocked; NaN where it is not logged
    spared: float
    seen: str  # when, in words
    held_back: HeldBack | None = None  # proof that a column's rank is late by itself

    @staticmethod
    def gather(yardstick: Yardstick, sighting: Sighting) -> "Evidence":
        row_ratio, row_z = yardstick.row(sighting)
        blocked_ratio, spared = yardstick.blocked(sighting) if sighting.place.kind == "column" else (math.nan, math.nan)
        return Evidence(
            sighting=sighting,
            wait_us=yardstick.wait_us(sighting),
            row_ratio=row_ratio,
            row_z=row_z,
            compute_ratio=yardstick.compute(sighting),
            compute_share=yardstick.compute_share(sighting),
            token_ratio=yardstick.tokens(sighting),
            blocked_ratio=blocked_ratio,
            spared=spared,
            seen=when(yardstick.matrices, sighting),
            held_back=HeldBack.find(yardstick, sighting) if sighting.place.kind == "column" else None,
        )

    def cause(self) -> str:
        explained = math.log(max(self.token_ratio, 1e-9)) >= TOKENS_EXPLAIN * math.log(max(self.sighting.ratio, 1.01))
        is_certain = self.held_back is not None and self.held_back.is_certain
        if self.token_ratio >= HIGH_TOKENS and explained and not is_certain:
            return "mixed"
        if self.held_back is not None:
            return self.held_back.cause
        if self.sighting.place.kind == "column":
            late = self.row_ratio <= LOW_ROW and self.row_z <= LOW_ROW_Z
            computes_longer = self.compute_ratio >= HIGH_COMPUTE
            if self.spared >= SPARED:
                late = True
            elif self.spared <= SHARES_IT:  # it is not late; a little more in the experts is not what all wait for
                late, computes_longer = False, computes_longer and self.compute_share >= COMPUTE_EXPLAINS
            if late or computes_longer:
                return "comp"
            # Where it is known how long ranks wait: a rank whose messages are late waits as long as the others.
            return "unknown" if self.spared > SHARES_IT else "comm"
        return "comp" if self.sighting.place.kind == "row" and self.compute_ratio <= LOW_COMPUTE else "comm"

    def text(self) -> str:
        kind, rank, src, dst, *_ = self.sighting.place
        ratio, past = self.sighting.ratio, self.sighting.is_change
        than = "before" if past else {"column": "for its peers", "row": "its peers", "point": "both ends explain"}[kind]
        what = {
            "column": f"the others wait {ratio:.2g}x as long for rank {rank} as {than}",
            "row": f"rank {rank} waits {ratio:.2g}x as long as {than}, for everyone",
            "point": f"rank {src} waits {ratio:.2g}x as long for rank {dst} as {than}",
        }[kind]
        rest = f"rank {dst if kind == 'point' else rank} computes {self.compute_ratio:.2g}x"
        if kind == "column":
            known = not math.isnan(self.blocked_ratio)
            rest += f", itself waits {self.blocked_ratio if known else self.row_ratio:.2g}x"
        rest += f", {'the link carries' if kind == 'point' else 'has'} {self.token_ratio:.2g}x the tokens"
        if self.held_back is not None:
            rest += f"; {self.held_back.words}"
        return f"{what} ({self.wait_us:.0f} us per call) {self.seen}; of the usual, {rest}"


def when(matrices: WindowMatrices, sighting: Sighting) -> str:
    """In which windows, in words."""
    num = int(matrices.num_windows_W[sighting.first : sighting.last + 1].sum())
    total = int(matrices.num_windows_W.sum())
    if num == total:
        return "in all windows" if total > 1 else "in the only window"
    since = matrices.start_s_W[sighting.first] - matrices.start_s_W[0]
    until = matrices.end_s_W[sighting.last] - matrices.start_s_W[0]
    end = "to the end" if sighting.last == len(matrices.window_W) - 1 else f"to {until:.0f} s, then recovered"
    return f"in {num} of {total} windows, from {since:.0f} s {end}"


_LOOK_AT_EXPERTS = "even out the experts (eprt balance)"
ADVICE = {  # (kind, cause)
    ("column", "comp"): "the rank arrives late: look for a throttled, shared or paused processor (its clock, other "
    "processes, its host)",
    ("column", "comm"): "the rank computes in time but its messages come late: check its network card, its links and "
    "what else uses them",
    (
        "column",
        "unknown",
    ): "the rank is late or its messages are, and nothing proves which: look at its processor (clock, "
    "other processes, quota) before its network card",
    ("column", "mixed"): "the rank has more tokens than its peers and takes longer for them: "
    f"{_LOOK_AT_EXPERTS} or the requests",
    ("row", "comp"): f"the rank has less to compute than its peers, so it waits for them: {_LOOK_AT_EXPERTS}",
    ("row", "comm"): "the rank receives slowly from everyone: check its network card and what else runs on its cores",
    ("row", "mixed"): f"the rank receives more tokens than its peers, all at once (incast): {_LOOK_AT_EXPERTS}",
    ("point", "comm"): "one direction of one link is slow: check the cable, the port or the route between the two "
    "ranks",
    (
        "job",
        "comp",
    ): "most ranks compute longer than before: look for what they share (clocks, power, heat, another job, "
    "a new build)",
    (
        "job",
        "comm",
    ): "all links are slower than before while the ranks compute as usual: look at the fabric that all of them share",
    (
        "tier",
        "comm",
    ): "all links of this kind are slower than before: look at the switches or the fabric that they share",
    ("node", "comp"): "the ranks of one node arrive late: look at its clocks, power, cooling and what else runs there",
    (
        "node",
        "comm",
    ): "what one node sends comes late: check its network cards, its switch port and what else uses them",
    ("node", "mixed"): f"the ranks of one node have more tokens than their peers: {_LOOK_AT_EXPERTS} or the requests",
    (
        "path",
        "comm",
    ): "the links between two nodes are slow while both are well otherwise: check the route, its switches and cables",
    ("path", "mixed"): "more tokens than usual cross between two nodes: look at the routing before the wire",
    ("point", "mixed"): "more tokens than usual cross this link: look at the routing before the wire",
}
