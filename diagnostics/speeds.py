"""rank_speeds: findings as weights for the balancer. A slow rank gets less load, so that it is done with the others.

    speeds_N = rank_speeds(report)                   # 1.0: as the others; 0.5: twice as long for the same tokens
    speeds_N = rank_speeds(later_report, speeds_N)   # and so on, window by window

Give a rank load in proportion to its speed. A rank that got less load is no longer waited for, so its finding ends with
the trouble it made; what it was given last is therefore kept for as long as it still takes longer per token.
"""

import numpy as np

from .analysis import Finding
from .effects import median
from .matrices import WindowMatrices
from .report import Report

MIN_SPEED = 0.2  # a rank slower than that should leave the group, not be carried
RECOVERED = 0.9  # from this speed on a rank counts as well again
LATEST = 6  # windows that tell how fast a rank is now
_REMEMBERED = 30  # windows: so long after it was last seen, slow messages count as not mended


def rank_speeds(report: Report, before_N: np.ndarray | None = None) -> np.ndarray:
    """float64 [N] in MIN_SPEED..1. before_N: what was returned for the windows before, if anything.

    Only ranks with a column finding (everyone waits for them) whose cause is comp or comm, and ranks that were slow
    before. comp: by time in the experts per token, over the latest windows. comm: by how much later its outputs come,
    over the windows of the finding. Uneven load (mixed) is nothing that a rank is to blame for.
    """
    matrices, num_ranks = report.matrices, report.num_ranks
    if before_N is not None and np.shape(before_N) != (num_ranks,):
        raise ValueError(f"before_N has shape {np.shape(before_N)}, expected ({num_ranks},)")
    speeds_N, pace_N = np.ones(num_ranks), _pace(matrices)
    held = [] if before_N is None else np.flatnonzero(np.asarray(before_N) < 1.0).tolist()
    for finding in report.findings:
        rank = finding.rank
        if finding.kind != "column" or rank is None or finding.cause == "mixed" or not _is_current(finding, matrices):
            continue
        slowness = pace_N[rank] if finding.cause == "comp" else max(pace_N[rank], _lateness(matrices, finding, rank))
        speeds_N[rank] = min(speeds_N[rank], 1 / slowness)
    for rank in held:
        speeds_N[rank] = min(speeds_N[rank], 1 / pace_N[rank])
    return np.where(speeds_N > RECOVERED, 1.0, np.maximum(speeds_N, MIN_SPEED))


def _is_current(finding: Finding, matrices: WindowMatrices) -> bool:
    return finding.last_window >= matrices.window_W[-_REMEMBERED:][0]


def _pace(matrices: WindowMatrices) -> np.ndarray:
    """[N], at least 1: a rank's time in the experts per token it was sent, over the median rank's."""
    latest = slice(-LATEST, None)
    tokens_WN = np.nansum(matrices.recv_tokens_WNN[latest], axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        per_token_N = median(matrices.compute_us_WN[latest] / np.where(tokens_WN > 0, tokens_WN, np.nan), 0)
        pace_N = per_token_N / median(per_token_N, 0)
    return np.maximum(1.0, np.nan_to_num(pace_N, nan=1.0, posinf=1.0))


def _lateness(matrices: WindowMatrices, finding: Finding, rank: int) -> float:
    """At least 1: the usual time in the experts and what the rank's outputs are late beyond it, over the usual."""
    within_W = (matrices.window_W >= finding.first_window) & (matrices.window_W <= finding.last_window)
    waits_us_NN = median(matrices.combine_us_WNN[within_W], 0)
    awaited_us_N = median(np.where(np.eye(matrices.num_ranks, dtype=bool), np.nan, waits_us_NN), 0)
    others_N = np.arange(matrices.num_ranks) != rank
    late_us = float(awaited_us_N[rank] - median(awaited_us_N[others_N], 0))
    usual_us = float(median(median(matrices.compute_us_WN[within_W], 0)[others_N], 0))
    return 1 + max(0.0, late_us) / usual_us if late_us > 0 and usual_us > 0 else 1.0
