"""The world "arrivals" of synthetic.py: dispatch and combine played call by call, waits measured as a runtime does.

Per call every rank gets ready, its tokens reach every other rank, it computes when it has all, and its outputs reach
every rank. A wait is the time from being ready to wait until the peer's data are there, 0 if they were before. All
windows are played side by side, each a chain of calls of its own.
"""

import numpy as np

from .matrices import WindowMatrices

READY_US, COMPUTE_US, LATENCY_US = 60.0, 200.0, 15.0
JITTER = 0.5  # coefficient of variation of a rank's own times, per call


def play(job, rng: np.random.Generator, num_calls: int) -> WindowMatrices:
    """job: synthetic.Job. A fault of factor f delays by (f - 1) usual waits."""
    from .synthetic import NODE_FACTOR, USUAL_TOKENS, matrices_of

    W, N = job.num_windows, job.num_ranks
    node_N = job.node_of_rank_N
    latency_WNN = np.broadcast_to(
        LATENCY_US * np.where(node_N[:, None] == node_N[None, :], 1.0, NODE_FACTOR), (W, N, N)
    ).copy()
    delay_WNN, late_WN, tokens_WNN = np.zeros((W, N, N)), np.zeros((W, N)), np.full((W, N, N), USUAL_TOKENS)
    usual_us = 0.56 * JITTER * (READY_US + COMPUTE_US) + LATENCY_US  # of two ranks' difference, both phases
    for fault in job.faults:
        first, last = fault.windows or (0, W - 1)
        _plant(fault, slice(first, last + 1), usual_us, delay_WNN, late_WN, tokens_WNN)
    ready_N = np.full(N, READY_US)
    if job.batch_skew:
        batch_N = rng.lognormal(0, job.batch_skew, N)
        ready_N, tokens_WNN = ready_N * batch_N, tokens_WNN * batch_N
    ready_N[list(job.idle)] *= 0.3
    tokens_WNN[:, :, list(job.idle)] = 0.0

    def jitter() -> np.ndarray:
        k = 1 / JITTER**2
        return rng.gamma(k, 1 / k, (W, N))

    own = np.eye(N, dtype=bool)
    time_WN = np.zeros((W, N))
    dispatch_WNN, combine_WNN, compute_WN = np.zeros((W, N, N)), np.zeros((W, N, N)), np.zeros((W, N))
    for _ in range(num_calls):
        ready_WN = time_WN + ready_N * jitter()
        there_WNN = ready_WN[:, None, :] + np.where(own, 0.0, latency_WNN + delay_WNN)
        dispatch_WNN += np.maximum(0.0, there_WNN - ready_WN[:, :, None])
        computing_WN = COMPUTE_US * jitter() + late_WN
        compute_WN += computing_WN
        done_WN = there_WNN.max(axis=2) + computing_WN
        back_WNN = done_WN[:, None, :] + np.where(own, 0.0, latency_WNN + delay_WNN)
        combine_WNN += np.maximum(0.0, back_WNN - done_WN[:, :, None])
        time_WN = back_WNN.max(axis=2)
        time_WN -= time_WN.min(axis=1, keepdims=True)
    return matrices_of(job, dispatch_WNN / num_calls, combine_WNN / num_calls, tokens_WNN, compute_WN / num_calls)


def _plant(
    fault, at: slice, usual_us: float, delay_WNN: np.ndarray, late_WN: np.ndarray, tokens_WNN: np.ndarray
) -> None:
    extra_us = (fault.factor - 1) * usual_us
    if fault.kind == "point":
        delay_WNN[at, fault.src, fault.dst] += extra_us
    elif fault.kind == "row" or fault.cause == "comm":  # a slow network card: here both directions look alike
        delay_WNN[at, fault.rank, :] += extra_us
    else:
        late_WN[at, fault.rank] += extra_us
    if fault.cause == "mixed":
        where = (at, fault.src, fault.dst) if fault.kind == "point" else (at, fault.rank)
        tokens_WNN[where] *= fault.factor
