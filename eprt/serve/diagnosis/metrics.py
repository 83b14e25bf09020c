"""Metrics of waits and findings, read when /metrics is scraped.

Label sets are bounded by the number of ranks and by the kinds and causes of findings. Links are counted, never listed,
because their number grows with the square of the ranks; /v1/eprt/diagnose names them.
"""

import itertools
from collections import Counter
from collections.abc import Iterable

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from eprt.serve.diagnosis.diagnosis import Diagnosis
from eprt.serve.series import series

_KINDS = ("column", "row", "point", "node", "path", "tier", "job", "hang")
_CAUSES = ("comp", "comm", "mixed", "unknown", "stopped")


class DiagnosisCollector:
    """Series of the latest window, and of the findings that last."""

    def __init__(self, diagnosis: Diagnosis, num_ranks: int):
        self._diagnosis, self._num_ranks = diagnosis, num_ranks

    def collect(self) -> Iterable[Metric]:
        diagnosis = self._diagnosis
        yield CounterMetricFamily("eprt_diagnose_windows", "Windows with calls", diagnosis.num_windows)
        text = "Windows that could not be written"
        yield CounterMetricFamily("eprt_diagnose_log_errors", text, diagnosis.num_log_errors)
        current = diagnosis.notices.current
        counts = dict.fromkeys(itertools.product(_KINDS, _CAUSES), 0)
        counts |= Counter((finding["kind"], finding["cause"]) for finding in current)
        hangs = diagnosis.live_hangs()
        counts |= Counter((hang.kind, hang.cause) for hang in hangs)
        yield series(GaugeMetricFamily, "eprt_findings", "Findings that last", ("kind", "cause"), counts.items())
        slow = {finding["rank"] for finding in current if finding["kind"] == "column"}
        ranks = range(self._num_ranks)
        yield _per_rank("eprt_rank_slow", "1 while all others wait for the rank", [rank in slow for rank in ranks])
        text = "1 while the rank reports no call though others do, or holds the others up"
        silent = {*diagnosis.silent, *(rank for hang in hangs for rank in (hang.rank, hang.src, hang.dst))}
        yield _per_rank("eprt_rank_silent", text, [rank in silent for rank in ranks])
        yield from self._heartbeats()
        text = "Part of an even load's share that the rank can carry"
        yield _per_rank("eprt_rank_speed", text, diagnosis.speeds_N)
        yield from self._waits()

    def _heartbeats(self) -> Iterable[Metric]:
        """As of the latest look; no series for a rank that takes no part."""
        stood = self._diagnosis.hangs.standings
        ages = (stood[rank].heard_s if rank in stood else np.nan for rank in range(self._num_ranks))
        yield _per_rank(
            "eprt_rank_heartbeat_age_seconds", "Since the rank's latest heartbeat; they come twice a second", ages
        )

    def _waits(self) -> Iterable[Metric]:
        """Waits in the latest window; no series for a rank without data."""
        matrices = self._diagnosis.matrices
        if matrices is None or self._num_ranks < 2:
            return
        wait_s_NN = matrices.wait_us_WNN[-1] * 1e-6
        known_N = ~np.isnan(wait_s_NN).all(axis=1)
        awaited_N = np.nansum(wait_s_NN, axis=0) / max(1, known_N.sum() - 1)
        waits_N = np.where(known_N, np.nansum(wait_s_NN, axis=1) / (self._num_ranks - 1), np.nan)
        yield _per_rank("eprt_rank_awaited_seconds", "How long another rank waits for this one per call", awaited_N)
        yield _per_rank("eprt_rank_waits_seconds", "How long this rank waits for another one per call", waits_N)
        compute_N = matrices.compute_us_WN[-1] * 1e-6
        yield _per_rank("eprt_rank_expert_seconds", "Time in the rank's experts per call", compute_N)


def _per_rank(name: str, text: str, values: Iterable[float]) -> Metric:
    known = ((rank, float(value)) for rank, value in enumerate(values) if np.isfinite(value))
    return series(GaugeMetricFamily, name, text, ("rank",), known)
