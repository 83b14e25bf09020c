"""Played arrivals: dispatch and combine call by call, waits measured as a runtime measures them.

In each call every rank gets ready, its tokens reach every other rank, it computes when it has all tokens, and its
outputs reach every rank. A wait is the time from being ready to wait until the peer's data are there, 0 if they were
there before. All windows are played side by side, each a chain of calls of its own.
"""

from functools import lru_cache

import numpy as np

from ..windows.matrices import WindowMatrices
from .job import NODE_FACTOR, USUAL_TOKENS, PlantedFault, SyntheticJob
from .log_form import make_matrices

READY_US, COMPUTE_US, LATENCY_US = 60.0, 200.0, 15.0
JITTER = 0.5  # coefficient of variation of a rank's own times, per call


class _World:
    """What determines the waits, in microseconds. Without faults at first."""

    def __init__(self, node_of_rank_N: np.ndarray, num_windows: int):
        num_ranks = len(node_of_rank_N)
        same_node_NN = node_of_rank_N[:, None] == node_of_rank_N[None, :]
        latency_NN = LATENCY_US * np.where(same_node_NN, 1.0, NODE_FACTOR)
        self.ready_N = np.full(num_ranks, READY_US)  # usual time to get ready
        self.latency_WNN = np.repeat(latency_NN[None], num_windows, axis=0)  # [w][i][j] from rank j to rank i
        self.late_WN = np.zeros((num_windows, num_ranks))  # added to the time in the experts

    def add_delay(self, fault: PlantedFault, at: slice, by_us: float) -> None:
        if fault.kind == "point":
            self.latency_WNN[at, fault.src, fault.dst] += by_us
        elif fault.kind == "row" or fault.cause == "comm":  # a slow network card: here both directions look alike
            self.latency_WNN[at, fault.rank, :] += by_us
        else:
            self.late_WN[at, fault.rank] += by_us


def play_calls(job: SyntheticJob, rng: np.random.Generator, num_calls: int) -> WindowMatrices:
    """A fault's delay is such that the waits at its place become `factor` times as long."""
    node_N = job.node_of_rank_N
    world = _World(node_N, job.num_windows)
    tokens_WNN = np.full(world.latency_WNN.shape, USUAL_TOKENS)
    for fault in job.faults:
        at = job.windows_of(fault)
        across = fault.kind == "point" and node_N[fault.src] != node_N[fault.dst]
        world.add_delay(fault, at, _delay_us(tuple(node_N.tolist()), fault.kind, fault.cause, across, fault.factor))
        if fault.cause == "mixed":
            where = (at, fault.src, fault.dst) if fault.kind == "point" else (at, fault.rank)
            tokens_WNN[where] *= fault.factor
    if job.batch_skew:
        batch_N = rng.lognormal(0, job.batch_skew, job.num_ranks)
        world.ready_N *= batch_N
        tokens_WNN *= batch_N
    world.ready_N[list(job.idle)] *= 0.3
    tokens_WNN[:, :, list(job.idle)] = 0.0
    dispatch_WNN, combine_WNN, compute_WN, blocked_WN = _play(world, rng, num_calls)
    return make_matrices(job, dispatch_WNN, combine_WNN, tokens_WNN, compute_WN, blocked_WN)


def _play(world: _World, rng: np.random.Generator, num_calls: int) -> tuple[np.ndarray, ...]:
    """Averages over the calls: dispatch_WNN, combine_WNN, compute_WN, blocked_WN."""
    W, N = world.late_WN.shape
    k = 1 / JITTER**2

    def jitter() -> np.ndarray:
        return rng.gamma(k, 1 / k, (W, N))

    wire_WNN = np.where(np.eye(N, dtype=bool), 0.0, world.latency_WNN)
    time_WN, compute_WN, blocked_WN = np.zeros((W, N)), np.zeros((W, N)), np.zeros((W, N))
    dispatch_WNN, combine_WNN = np.zeros((W, N, N)), np.zeros((W, N, N))
    for _ in range(num_calls):
        ready_WN = time_WN + world.ready_N * jitter()
        there_WNN = ready_WN[:, None, :] + wire_WNN
        dispatch_WNN += np.maximum(0.0, there_WNN - ready_WN[:, :, None])
        computing_WN = COMPUTE_US * jitter() + world.late_WN
        compute_WN += computing_WN
        all_there_WN = there_WNN.max(axis=2)
        done_WN = all_there_WN + computing_WN
        back_WNN = done_WN[:, None, :] + wire_WNN
        combine_WNN += np.maximum(0.0, back_WNN - done_WN[:, :, None])
        time_WN = back_WNN.max(axis=2)
        blocked_WN += all_there_WN - ready_WN + time_WN - done_WN
        time_WN -= time_WN.min(axis=1, keepdims=True)
    return tuple(total / num_calls for total in (dispatch_WNN, combine_WNN, compute_WN, blocked_WN))


@lru_cache(maxsize=256)
def _delay_us(node_of_rank: tuple[int, ...], kind: str, cause: str, across: bool, factor: float) -> float:
    """The delay that makes the waits of a column, row or point `factor` times as long, found by playing."""
    node_N = np.array(node_of_rank)
    src = int(np.flatnonzero((node_N != node_N[0]) == across)[-1])
    rank, link = (None, (src, 0)) if kind == "point" else (0, (None, None))
    fault = PlantedFault(kind, rank, *link, cause=cause)
    others = slice(1, None)
    place = {"point": (src, 0), "row": (0, others), "column": (others, 0)}[kind]

    def waits(delay_us: float) -> np.ndarray:
        world = _World(node_N, num_windows=8)
        world.add_delay(fault, slice(None), delay_us)
        dispatch_WNN, combine_WNN, *_ = _play(world, np.random.default_rng(0), num_calls=60)
        return (dispatch_WNN + combine_WNN).mean(axis=0)[place]

    usual = waits(0.0)
    low_us, high_us = 0.0, 40 * factor * COMPUTE_US
    for _ in range(14):
        middle_us = (low_us + high_us) / 2
        if np.mean(waits(middle_us) / usual) < factor:
            low_us = middle_us
        else:
            high_us = middle_us
    return (low_us + high_us) / 2
