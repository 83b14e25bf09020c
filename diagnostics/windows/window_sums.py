"""WindowSums: the records of a run added up as they come, line by line in any order, in bounded memory."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..log.events import PER_RANK, WindowRecord
from ..log.reader import LogPlace
from ..log.usage import USAGE
from .matrices import WindowMatrices
from .medians import median
from .spans import SpanTable
from .totals import WindowTotals
from .view import to_course

LINK_SERIES = ("wait", "dispatch", "combine", "tokens")


def most_kept(num_ranks: int) -> int:
    """Windows kept apart: so many that keeping and analysing them takes below 200 MB and a few seconds."""
    return max(6, min(256, 6144 // num_ranks, 1_572_864 // num_ranks**2))


class WindowSums:
    """Spans of windows, as arrays or as the course of a link. most: how many are kept; None: one for each window."""

    def __init__(self, num_ranks: int, most: int | None = None):
        self.num_ranks = num_ranks
        self.node_of_rank: tuple[int, ...] = ()  # as the first record has it
        self._table = SpanTable(partial(WindowTotals, num_ranks), most)

    @staticmethod
    def from_records(records: Sequence[WindowRecord]) -> "WindowSums":
        """records: of one run, at least one; of the same window and rank only the last counts."""
        if not records:
            raise ValueError("no records")
        sums = WindowSums(records[0].num_ranks)
        for record in {(record.window, record.rank): record for record in records}.values():
            sums.add_record(record)
        return sums

    def add_record(self, record: WindowRecord, place: LogPlace | None = None) -> None:
        """record: one per window and rank. place: where its expert rows can be read again; default: they are kept."""
        self.node_of_rank = self.node_of_rank or record.node_of_rank
        self._table.span_of(record.window).add_record(record, place)

    @property
    def spans(self) -> list[WindowTotals]:
        return [span for _, span in self._table.items()]

    def total(self) -> WindowTotals:
        """All windows together."""
        total = WindowTotals(self.num_ranks)
        for span in self.spans:
            total.append_span(span)
        return total

    def matrices(self) -> WindowMatrices:
        """ValueError without any window."""
        spans = self.spans
        if not spans:
            raise ValueError("no records")
        calls_WN = np.stack([span.calls_N for span in spans])
        known_WN = np.where(calls_WN > 0, calls_WN, np.nan)
        dispatch_us, combine_us, recv_tokens, sent_tokens = (
            np.stack([span.planes_PNN[p] for span in spans]) / known_WN[:, :, None] for p in range(len(PER_RANK))
        )
        usage_UWN = np.stack([span.usage_UN for span in spans], axis=1) / known_WN
        return WindowMatrices(
            window_W=np.array([span.windows.first for span in spans]),
            last_window_W=np.array([span.windows.last for span in spans]),
            num_windows_W=np.array([len(span.windows) for span in spans]),
            start_s_W=np.array([span.t_start for span in spans]),
            end_s_W=np.array([span.t_end for span in spans]),
            node_of_rank_N=np.array(self.node_of_rank),
            dispatch_us_WNN=dispatch_us,
            combine_us_WNN=combine_us,
            recv_tokens_WNN=recv_tokens,
            sent_tokens_WNN=sent_tokens,
            compute_us_WN=np.stack([span.compute_us_N for span in spans]) / known_WN,
            calls_WN=calls_WN,
            blocked_us_WN=np.stack([span.blocked_us_N for span in spans]) / known_WN,
            experts={(w, rank): kept for w, span in enumerate(spans) for rank, (_, kept) in span.experts.items()},
            usage_WN={name: usage_UWN[u] for u, name in enumerate(USAGE) if not np.isnan(usage_UWN[u]).all()},
            processes={rank: process for span in spans for rank, process in span.processes.items()},
            standings={place: stood for span in spans for place, stood in span.standings.items()},
        )

    def link(self, src: int, dst: int) -> dict[str, Any]:
        """The course of a link: how long rank src waited for rank dst per call, and the tokens it got from it, beside
        medians over the links of the same tier (inside a node, or between nodes). KeyError: no such rank."""
        if not (0 <= src < self.num_ranks and 0 <= dst < self.num_ranks):
            raise KeyError(src, dst)
        node_N = np.array(self.node_of_rank)
        same_NN = node_N[:, None] == node_N[None, :]
        tier_NN = (same_NN == same_NN[src, dst]) & ~np.eye(self.num_ranks, dtype=bool)
        spans = self.spans
        own_CS, usual_CS = np.zeros((2, len(spans), len(LINK_SERIES)))
        for c, span in enumerate(spans):
            dispatch_NN, combine_NN, tokens_NN = span.view(None).planes_PNN
            for s, plane_NN in enumerate((dispatch_NN + combine_NN, dispatch_NN, combine_NN, tokens_NN)):
                own_CS[c, s], usual_CS[c, s] = plane_NN[src, dst], median(plane_NN[tier_NN], 0)
        first_C, last_C = [span.windows.first for span in spans], [span.windows.last for span in spans]
        return {"src": src, "dst": dst, **to_course(LINK_SERIES, first_C, last_C, own_CS, usual_CS)}
