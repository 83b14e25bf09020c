"""Cost: what a finding costs: how long a step would take without it. Knows no causes.

All ranks wait for the one that comes last. Without one rank's lateness they wait for the next latest instead; so the
cost of a rank is its lateness beyond that one's, in dispatch and in combine.
"""

from dataclasses import dataclass

import numpy as np

from ..windows.matrices import WindowMatrices
from ..windows.medians import median, median_of_known

_LEAST_LEFT = 0.02  # of a step: nothing makes it free


@dataclass(frozen=True)
class Cost:
    """Of one finding, if it alone were mended and everything else stayed. Steps are those in which ranks compute."""

    lost: float  # part of the time, 0 to 1
    us_per_call: float | None = None  # None where nothing moves
    step_ms: float | None = None  # None where the log has no `usage`
    step_ms_without: float | None = None
    tokens_per_s: float | None = None  # of all ranks, while there is work
    tokens_per_s_without: float | None = None


STANDSTILL = Cost(lost=1.0)


def cost_of(matrices: WindowMatrices, at: slice, rank: int) -> Cost:
    """at: the finding's windows. rank: the one that is late because of it."""
    saved_us = sum(_beyond_next(part[at], rank) for part in (matrices.dispatch_us_WNN, matrices.combine_us_WNN))
    span_us_W = (matrices.end_s_W - matrices.start_s_W)[at] * 1e6
    usage = {name: values_WN[at] for name, values_WN in matrices.usage_WN.items()}
    step_us, steps = (_per_call(usage.get(name)) for name in ("step_us", "steps"))
    if not (step_us > 0 and steps > 0):
        call_us = median_of_known(
            span_us_W[:, None] / np.where(matrices.calls_WN[at] > 0, matrices.calls_WN[at], np.nan)
        )
        lost = _share(saved_us, call_us)
        return Cost(round(lost, 4), round(saved_us, 1))
    lost = _share(saved_us, step_us)
    tokens_W = np.nansum(usage["tokens"] * matrices.calls_WN[at], axis=1) if "tokens" in usage else None
    step_us_W = median(usage["step_us"] * matrices.calls_WN[at], 1)
    tokens_per_s = None if tokens_W is None else float(np.nansum(tokens_W) / max(1e-9, np.nansum(step_us_W))) * 1e6
    return Cost(
        lost=round(lost, 4),
        us_per_call=round(saved_us, 1),
        step_ms=round(step_us / steps / 1e3, 3),
        step_ms_without=round(step_us / steps * (1 - lost) / 1e3, 3),
        tokens_per_s=None if tokens_per_s is None else round(tokens_per_s, 1),
        tokens_per_s_without=None if tokens_per_s is None else round(tokens_per_s / (1 - lost), 1),
    )


def _beyond_next(waits_us_WNN: np.ndarray, rank: int) -> float:
    """How long a rank is awaited per call, by the median of the others, beyond the next latest rank. At least 0."""
    num_ranks = waits_us_WNN.shape[1]
    known = ~np.isnan(waits_us_WNN)
    mean_us_NN = np.where(known, waits_us_WNN, 0.0).sum(axis=0) / np.maximum(1, known.sum(axis=0))
    awaited_us_N = np.nan_to_num(median(np.where(np.eye(num_ranks, dtype=bool), np.nan, mean_us_NN), 0))
    return max(0.0, float(awaited_us_N[rank] - np.delete(awaited_us_N, rank).max(initial=0.0)))


def _per_call(values_WN: np.ndarray | None) -> float:
    return 0.0 if values_WN is None else float(np.nan_to_num(median_of_known(values_WN)))


def _share(saved_us: float, whole_us: float) -> float:
    return min(1 - _LEAST_LEFT, saved_us / whole_us) if whole_us > 0 else 0.0
