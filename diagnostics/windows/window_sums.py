"""WindowSums: windows of a job added up as they come, line by line in any order, in bounded memory.

Up to a number of windows each is kept by itself. A longer log is thinned: 2, 4, 8 ... windows with consecutive numbers
become one, their totals added up, so that nothing is left out, only onset and recovery are known less exactly.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..detect.effects import median
from ..log.events import ExpertRows, WindowRecord
from .history import plain
from .matrices import WindowMatrices

_PLANES = ("dispatch_wait_us", "combine_wait_us", "recv_tokens", "sent_tokens")
LINK_SERIES = ("wait", "dispatch", "combine", "tokens")
ExpertsOf = Callable[[], ExpertRows | None]


def most_kept(num_ranks: int) -> int:
    """Windows kept apart: so many that keeping and analysing them takes below 200 MB and a few seconds."""
    return max(6, min(256, 6144 // num_ranks, 1_572_864 // num_ranks**2))


class _Sums:
    """P planes (as _PLANES), N ranks; totals over the calls of one or more windows."""

    def __init__(self, num_ranks: int):
        self.planes_PNN = np.zeros((len(_PLANES), num_ranks, num_ranks))
        self.compute_us_N, self.blocked_us_N, self.calls_N = (np.zeros(num_ranks) for _ in range(3))
        self.t_start, self.t_end = np.inf, -np.inf
        self.windows = 0  # bit k: window first + k was seen
        self.experts: dict[int, tuple[int, ExpertsOf]] = {}  # rank -> window, its slots

    def add(self, record: WindowRecord, bit: int, experts: ExpertsOf | None) -> None:
        rank = record.rank
        self.windows |= 1 << bit
        self.t_start, self.t_end = min(self.t_start, record.t_start), max(self.t_end, record.t_end)
        if experts is not None:
            self._set_experts(rank, record.window, experts)
        if record.num_calls == 0:
            return
        self.calls_N[rank] += record.num_calls
        self.compute_us_N[rank] += record.compute_us
        self.blocked_us_N[rank] += np.nan if record.blocked_us is None else record.blocked_us
        for plane, name in enumerate(_PLANES):
            self.planes_PNN[plane, rank] += getattr(record, name)

    def _set_experts(self, rank: int, window: int, experts: ExpertsOf) -> None:
        if rank not in self.experts or self.experts[rank][0] <= window:
            self.experts[rank] = window, experts

    def merge(self, later: "_Sums", shift: int) -> None:
        self.planes_PNN += later.planes_PNN
        self.compute_us_N += later.compute_us_N
        self.blocked_us_N += later.blocked_us_N
        self.calls_N += later.calls_N
        self.t_start, self.t_end = min(self.t_start, later.t_start), max(self.t_end, later.t_end)
        self.windows |= later.windows << shift
        for rank, (window, experts) in later.experts.items():
            self._set_experts(rank, window, experts)


class WindowSums:
    """most: windows kept apart; None: all of them, however many. per_group: windows that share one place."""

    def __init__(self, num_ranks: int, node_of_rank: tuple[int, ...], most: int | None = None):
        self.num_ranks, self.node_of_rank, self.per_group = num_ranks, node_of_rank, 1
        self._most = most
        self._groups: dict[int, _Sums] = {}  # by window number // per_group

    def add(self, record: WindowRecord, experts: ExpertsOf | None = None) -> None:
        """record: one per window and rank. experts: where to find them later; default: in the record."""
        if experts is None and record.experts is not None:
            table = record.experts
            experts = lambda: table  # noqa: E731
        group, bit = divmod(record.window, self.per_group)
        if group not in self._groups:
            self._groups[group] = _Sums(self.num_ranks)
            while self._most and len(self._groups) > self._most:
                self._halve()
            group, bit = divmod(record.window, self.per_group)
        self._groups[group].add(record, bit, experts)

    def _halve(self) -> None:
        merged: dict[int, _Sums] = {}
        for group in sorted(self._groups):
            sums = self._groups.pop(group)
            half, is_later = divmod(group, 2)
            if half in merged:
                merged[half].merge(sums, self.per_group)
            else:
                sums.windows <<= self.per_group * is_later
                merged[half] = sums
        self._groups = merged
        self.per_group *= 2

    @property
    def num_windows(self) -> int:
        return sum(sums.windows.bit_count() for sums in self._groups.values())

    def matrices(self) -> WindowMatrices:
        """ValueError without any window."""
        if not self._groups:
            raise ValueError("no records")
        parts = [sums for _, sums in sorted(self._groups.items())]
        first_W, last_W = self._ends()
        calls_WN = np.stack([part.calls_N for part in parts])
        known_WN = np.where(calls_WN > 0, calls_WN, np.nan)
        dispatch_us, combine_us, recv_tokens, sent_tokens = (
            np.stack([part.planes_PNN[p] for part in parts]) / known_WN[:, :, None] for p in range(len(_PLANES))
        )
        compute_us_WN = np.stack([part.compute_us_N for part in parts]) / known_WN
        experts = {(w, rank): of for w, part in enumerate(parts) for rank, (_, of) in part.experts.items()}
        return WindowMatrices(
            np.array(first_W), np.array([part.t_start for part in parts]), np.array([part.t_end for part in parts]),
            np.array(self.node_of_rank), dispatch_us, combine_us, recv_tokens, sent_tokens, compute_us_WN, calls_WN,
            experts,
            last_window_W=np.array(last_W), num_windows_W=np.array([part.windows.bit_count() for part in parts]),
            blocked_us_WN=np.stack([part.blocked_us_N for part in parts]) / known_WN,
        )  # fmt: skip

    def link(self, src: int, dst: int) -> dict[str, Any]:
        """How long rank src waited for rank dst per call, and the tokens it got from it, in each window (or several).

        usual: the median over the links of the same kind, inside a node or between nodes. KeyError: no such rank.
        """
        if not (0 <= src < self.num_ranks and 0 <= dst < self.num_ranks):
            raise KeyError(src, dst)
        node_N = np.array(self.node_of_rank)
        same_NN = node_N[:, None] == node_N[None, :]
        tier_NN = (same_NN == same_NN[src, dst]) & ~np.eye(self.num_ranks, dtype=bool)
        own, usual = [], []
        for _, part in sorted(self._groups.items()):
            planes_PNN = part.planes_PNN[:3] / np.where(part.calls_N > 0, part.calls_N, np.nan)[:, None]
            dispatch, combine, tokens = planes_PNN[:, src, dst]
            own.append((dispatch + combine, dispatch, combine, tokens))
            wait_NN = planes_PNN[0] + planes_PNN[1]
            usual.append([median(plane_NN[tier_NN], 0) for plane_NN in (wait_NN, *planes_PNN)])
        first_W, last_W = self._ends()
        return {
            "src": src,
            "dst": dst,
            "first": first_W,
            "last": last_W,
            "series": {name: plain(values) for name, values in zip(LINK_SERIES, zip(*own))},
            "usual": {name: plain(values) for name, values in zip(LINK_SERIES, zip(*usual))},
        }

    def _ends(self) -> tuple[list[int], list[int]]:
        """First and last window of each group."""
        bits = {group: sums.windows for group, sums in sorted(self._groups.items())}
        first = [group * self.per_group + _lowest_bit(windows) for group, windows in bits.items()]
        return first, [group * self.per_group + windows.bit_length() - 1 for group, windows in bits.items()]


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
