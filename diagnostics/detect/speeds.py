"""rank_speeds: findings as weights for the balancer, so that a slow rank gets less load. Plans no placement.

    speeds_N = rank_speeds(report)                   # 1.0: as the others; 0.5: twice as long for the same tokens; 1.5:
                                                     # an early rank, that takes two thirds of the time
    speeds_N = rank_speeds(later_report, speeds_N)   # and so on, window by window

Give a rank load in proportion to its speed. Nobody waits any longer for a rank that got less load, so its finding ends;
its last speed is therefore kept for as long as it still takes longer per token.
"""

import numpy as np

from ..windows.matrices import WindowMatrices
from ..windows.medians import median
from .report import Report

MIN_SPEED = 0.2  # a rank slower than that should leave the group, not be carried
MAX_SPEED, FASTER = 2.0, 1.1  # of an early rank: no more load than that at once; less is chance
RECOVERED = 0.9  # from this speed on a rank counts as healthy again
LATEST = 6  # windows that show how fast a rank is now
# For how many windows after it was last seen a finding counts. Slow messages show in nothing else, so less load may
# hide them; whether late compute is over shows in the time per token.
_REMEMBERED = {"comm": 30, "comp": 2, "unknown": 2}


def rank_speeds(report: Report, before_N: np.ndarray | None = None) -> np.ndarray:
    """float64 [N] in MIN_SPEED..MAX_SPEED. before_N: the result for the windows before, if any.

    Below 1 are only ranks with a column finding (everyone waits for them) whose cause is not mixed, and ranks that
    were slow before; never below one over the finding's ratio. By time in the experts per token, or by time it is not
    blocked, where that is logged, over the latest windows of the finding; comm: also by the delay of its outputs.
    Uneven load (mixed) is not a rank's fault.
    Above 1 are early ranks, and those that were, as far as they take less time per token.
    """
    matrices, num_ranks = report.matrices, report.num_ranks
    if before_N is not None and np.shape(before_N) != (num_ranks,):
        raise ValueError(f"before_N has shape {np.shape(before_N)}, expected ({num_ranks},)")
    speeds_N, pace_N = np.ones(num_ranks), _slowness(matrices, np.ones(len(matrices.window_W), dtype=bool))
    is_named_N = np.zeros(num_ranks, dtype=bool)
    for finding in report.findings:
        rank = finding.rank
        if finding.kind != "column" or rank is None or finding.cause == "mixed":
            continue
        if finding.last_window < matrices.window_W[-_REMEMBERED[finding.cause] :][0]:
            continue
        within_W = (matrices.window_W >= finding.first_window) & (matrices.window_W <= finding.last_window)
        slowness = _slowness(matrices, within_W)[rank]
        if finding.cause == "comm":
            slowness = max(slowness, _lateness(matrices, within_W, rank))
        # Less load than the others' waits justify would only move the lateness elsewhere.
        speeds_N[rank] = min(speeds_N[rank], max(1 / slowness, 1 / max(1.0, finding.ratio)))
        is_named_N[rank] = True
    if before_N is not None:
        was_slow_N = (np.asarray(before_N) < 1.0) & ~is_named_N  # without a finding it can only recover
        speeds_N = np.where(was_slow_N, np.maximum(before_N, 1 / pace_N), speeds_N)
    speeds_N = np.where(speeds_N > RECOVERED, 1.0, np.maximum(speeds_N, MIN_SPEED))
    newest = matrices.window_W[-_REMEMBERED["comp"] :][0]
    is_early_N = np.isin(np.arange(num_ranks), [early.rank for early in report.early if early.last_window >= newest])
    if before_N is not None:
        is_early_N |= np.asarray(before_N) > 1.0
    quick_N = np.where(is_early_N & (speeds_N == 1.0), _quickness(matrices), 1.0)
    return np.where(quick_N >= FASTER, quick_N, speeds_N)


def _quickness(matrices: WindowMatrices) -> np.ndarray:
    """[N] in 1..MAX_SPEED: the usual time in the experts per token over a rank's own, in the latest windows."""
    with np.errstate(divide="ignore"):
        return np.clip(1 / _per_token(matrices, np.arange(len(matrices.window_W))[-LATEST:]), 1.0, MAX_SPEED)


def _slowness(matrices: WindowMatrices, within_W: np.ndarray) -> np.ndarray:
    """[N], at least 1, over the latest of these windows."""
    latest_W = np.flatnonzero(within_W)[-LATEST:]
    return np.maximum(_pace(matrices, latest_W), _busy(matrices, latest_W))


def _pace(matrices: WindowMatrices, latest: np.ndarray) -> np.ndarray:
    """[N], at least 1."""
    return np.maximum(1.0, _per_token(matrices, latest))


def _per_token(matrices: WindowMatrices, latest: np.ndarray) -> np.ndarray:
    """[N]: a rank's time in the experts per token it was sent, over the median rank's; 1 where it is not known."""
    tokens_WN = np.nansum(matrices.recv_tokens_WNN[latest], axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        per_token_N = median(matrices.compute_us_WN[latest] / np.where(tokens_WN > 0, tokens_WN, np.nan), 0)
        pace_N = per_token_N / median(per_token_N, 0)
    return np.where(np.isfinite(pace_N) & (pace_N > 0), pace_N, 1.0)


def _busy(matrices: WindowMatrices, latest: np.ndarray) -> np.ndarray:
    """[N], at least 1: a rank's time per call in which it waits for nobody, over the median rank's. A pause outside the
    experts shows here. Idle time, which all ranks share, makes the ranks look more alike."""
    span_us_W1 = ((matrices.end_s_W - matrices.start_s_W)[latest] * 1e6)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        busy_us_N = median(span_us_W1 / matrices.calls_WN[latest] - matrices.blocked_us_WN[latest], 0)
        busy_N = busy_us_N / median(busy_us_N, 0) if np.nanmin(busy_us_N, initial=np.inf) > 0 else busy_us_N * np.nan
    return np.maximum(1.0, np.nan_to_num(busy_N, nan=1.0, posinf=1.0))


def _lateness(matrices: WindowMatrices, within_W: np.ndarray, rank: int) -> float:
    """At least 1: the usual time in the experts plus the delay of the rank's outputs, over the usual time."""
    waits_us_NN = median(matrices.combine_us_WNN[within_W], 0)
    awaited_us_N = median(np.where(np.eye(matrices.num_ranks, dtype=bool), np.nan, waits_us_NN), 0)
    others_N = np.arange(matrices.num_ranks) != rank
    late_us = float(awaited_us_N[rank] - median(awaited_us_N[others_N], 0))
    usual_us = float(median(median(matrices.compute_us_WN[within_W], 0)[others_N], 0))
    return 1 + max(0.0, late_us) / usual_us if late_us > 0 and usual_us > 0 else 1.0
