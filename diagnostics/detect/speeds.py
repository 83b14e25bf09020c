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
_TOKENS_ALIKE = 0.1  # root of the summed squares of the logarithms of tokens: less does not show how time grows
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
    paces = _Paces(matrices, _is_healthy_WN(report, before_N))
    speeds_N, pace_N = np.ones(num_ranks), paces.slowness_N(np.ones(len(matrices.window_W), dtype=bool))
    is_named_N = np.zeros(num_ranks, dtype=bool)
    for finding in report.findings:
        rank = finding.rank
        if finding.kind != "column" or rank is None or finding.cause == "mixed":
            continue
        if finding.last_window < matrices.window_W[-_REMEMBERED[finding.cause] :][0]:
            continue
        within_W = (matrices.window_W >= finding.first_window) & (matrices.window_W <= finding.last_window)
        slowness = paces.slowness_N(within_W)[rank]
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
    quick_N = np.where(is_early_N & (speeds_N == 1.0), paces.quickness_N(), 1.0)
    return np.where(quick_N >= FASTER, quick_N, speeds_N)


def _is_healthy_WN(report: Report, before_N: np.ndarray | None) -> np.ndarray:
    """bool [W, N]: neither late, nor slow since it was late, nor early."""
    matrices = report.matrices
    is_healthy_WN = np.ones(matrices.calls_WN.shape, dtype=bool)
    is_slow_N = np.zeros(report.num_ranks, dtype=bool) if before_N is None else np.asarray(before_N) < 1.0
    told_N = np.zeros(report.num_ranks, dtype=bool)
    for found in (*(f for f in report.findings if f.kind == "column"), *report.early):
        if found.rank is None:
            continue
        until = np.inf if is_slow_N[found.rank] else found.last_window
        within_W = (matrices.last_window_W >= found.first_window) & (matrices.window_W <= until)
        is_healthy_WN[within_W, found.rank] = False
        told_N[found.rank] = True
    is_healthy_WN[:, is_slow_N & ~told_N] = False
    return is_healthy_WN


class _Paces:
    """How long ranks take for their work, beside the median rank. [N] and at least 1 where nothing else is said.

    is_healthy_WN: where a rank is neither slow nor early. Time in the experts has a part that does not grow with the
    tokens (reading the weights), and with few tokens that is most of it: a rank that has half of the tokens then takes
    twice the time per token, slow or not. So the time is compared with tokens to the power that healthy ranks show: 1
    where it grows as they do, and where all ranks have about as many; 0 where it does not depend on them.
    """

    def __init__(self, matrices: WindowMatrices, is_healthy_WN: np.ndarray):
        self._matrices = matrices
        tokens_WN = np.nansum(matrices.recv_tokens_WNN, axis=2)
        self._tokens_WN = np.where(tokens_WN > 0, tokens_WN, np.nan)
        self._power = self._fit(is_healthy_WN)

    def _fit(self, is_healthy_WN: np.ndarray) -> float:
        compute_us_WN = np.where(self._matrices.compute_us_WN > 0, self._matrices.compute_us_WN, np.nan)
        # [2][W][N], each beside the window's median rank
        logs_2WN = np.log(np.stack((self._tokens_WN, compute_us_WN / self._tokens_WN)))
        logs_2WN -= median(logs_2WN, 2)[:, :, None]
        tokens_N, per_token_N = median(np.where(is_healthy_WN, logs_2WN, np.nan), 1)
        known_N = np.isfinite(tokens_N) & np.isfinite(per_token_N)
        if known_N.sum() < 2:
            return 1.0
        tokens_N, per_token_N = tokens_N[known_N], per_token_N[known_N]
        tokens_N = tokens_N - tokens_N.mean()
        slope = np.sum(tokens_N * per_token_N) / (np.sum(tokens_N**2) + _TOKENS_ALIKE**2)
        return float(np.clip(1 + slope, 0.0, 1.0))

    def slowness_N(self, within_W: np.ndarray) -> np.ndarray:
        """Over the latest of these windows."""
        latest_W = np.flatnonzero(within_W)[-LATEST:]
        return np.maximum(np.maximum(1.0, self._per_work_N(latest_W)), self._busy_N(latest_W))

    def quickness_N(self) -> np.ndarray:
        """In 1..MAX_SPEED, in the latest windows: the usual time in the experts for as many tokens, over its own."""
        with np.errstate(divide="ignore"):
            return np.clip(1 / self._per_work_N(np.arange(len(self._matrices.window_W))[-LATEST:]), 1.0, MAX_SPEED)

    def _per_work_N(self, latest: np.ndarray) -> np.ndarray:
        """A rank's time in the experts over the usual for as many tokens; 1 where it is not known."""
        with np.errstate(divide="ignore", invalid="ignore"):
            per_work_N = median(self._matrices.compute_us_WN[latest] / self._tokens_WN[latest] ** self._power, 0)
            pace_N = per_work_N / median(per_work_N, 0)
        return np.where(np.isfinite(pace_N) & (pace_N > 0), pace_N, 1.0)

    def _busy_N(self, latest: np.ndarray) -> np.ndarray:
        """A rank's time per call in which it waits for nobody, over the median rank's. A pause outside the experts
        shows here. Idle time, which all ranks share, makes the ranks look more alike."""
        matrices = self._matrices
        span_us_W1 = ((matrices.end_s_W - matrices.start_s_W)[latest] * 1e6)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            busy_us_N = median(span_us_W1 / matrices.calls_WN[latest] - matrices.blocked_us_WN[latest], 0)
            busy_N = (
                busy_us_N / median(busy_us_N, 0) if np.nanmin(busy_us_N, initial=np.inf) > 0 else busy_us_N * np.nan
            )
        return np.maximum(1.0, np.nan_to_num(busy_N, nan=1.0, posinf=1.0))


def _lateness(matrices: WindowMatrices, within_W: np.ndarray, rank: int) -> float:
    """At least 1: the usual time in the experts plus the delay of the rank's outputs, over the usual time."""
    waits_us_NN = median(matrices.combine_us_WNN[within_W], 0)
    awaited_us_N = median(np.where(np.eye(matrices.num_ranks, dtype=bool), np.nan, waits_us_NN), 0)
    others_N = np.arange(matrices.num_ranks) != rank
    late_us = float(awaited_us_N[rank] - median(awaited_us_N[others_N], 0))
    usual_us = float(median(median(matrices.compute_us_WN[within_W], 0)[others_N], 0))
    return 1 + max(0.0, late_us) / usual_us if late_us > 0 and usual_us > 0 else 1.0
