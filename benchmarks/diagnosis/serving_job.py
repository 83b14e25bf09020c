"""ServingJob: plays the calls of a job with a fault, and gives the lines that its ranks would have logged.

Implements docs/diagnosis-noise.md; what is usual is drawn by serving_noise.py. Knows nothing of how anything is
detected, and shares with the detector only the format of a line.
"""

from dataclasses import dataclass, replace

import numpy as np
from eprt.diagnostics.log.events import WindowRecord

from benchmarks.diagnosis.serving_noise import CALLS, CALLS_PLAYED, Usual, draw_usual

WINDOW_S = 10.0
FAULTS = ("column comp", "column comm", "row", "point", "early", "job", "tier", "node comp", "node comm", "path")


@dataclass(frozen=True)
class ServingFault:
    """A fault with its place."""

    kind: str  # one of FAULTS
    factor: float  # of the waits at its place; of "early": of the rank's time; of "job": of everything
    place: tuple[int, ...] = ()  # a rank, (receiver, sender), a node, or two nodes
    windows: tuple[int, int] = (4, 11)  # the first and the last


@dataclass(frozen=True)
class ServingJob:
    """Everything follows from the seed."""

    num_ranks: int
    family: str
    seed: int
    num_windows: int = 12
    node_of_rank: tuple[int, ...] = ()  # empty: one node
    fault: ServingFault | None = None
    first_window: int = 0
    slow_pairs: tuple[tuple[int, int], ...] = ()  # nodes further apart than others: their links take twice as long

    @property
    def node_of_rank_N(self) -> np.ndarray:
        return np.array(self.node_of_rank or (0,) * self.num_ranks)


@dataclass(frozen=True)
class _Extra:
    """What a fault adds, by window: factors of a rank's time, and latency of links."""

    time_WN: np.ndarray
    latency_us_WNN: np.ndarray
    everything_W: np.ndarray


@dataclass(frozen=True)
class _Logged:
    """What the ranks measured, per call."""

    dispatch_us_WNN: np.ndarray
    combine_us_WNN: np.ndarray
    compute_us_WN: np.ndarray
    blocked_us_WN: np.ndarray
    call_us_W: np.ndarray


def play_records(job: ServingJob) -> list[WindowRecord]:
    """The lines of all windows, by window, then rank."""
    rng = np.random.default_rng([job.seed, job.num_ranks, sum(map(ord, job.family))])
    usual = draw_usual(job.family, job.num_windows, job.node_of_rank_N, rng)
    for first, second in job.slow_pairs:
        usual.latency_us_WNN[:, _between(job.node_of_rank_N, (first, second))] *= 2
    seed = int(rng.integers(2**62))
    logged = _play(usual, _extra_of(job, usual, seed), seed)
    return _lines(job, usual, logged)


def _between(node_of_rank_N: np.ndarray, nodes: tuple[int, ...]) -> np.ndarray:
    receiver_NN, sender_NN = np.meshgrid(node_of_rank_N, node_of_rank_N, indexing="ij")
    first, second = nodes
    return ((receiver_NN == first) & (sender_NN == second)) | ((receiver_NN == second) & (sender_NN == first))


def _places(fault: ServingFault, node_of_rank_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ranks whose time is longer, and the links whose latency is: at full strength 1."""
    num = len(node_of_rank_N)
    ranks_N, links_NN = np.zeros(num), np.zeros((num, num))
    match fault.kind:
        case "column comp" | "early":
            ranks_N[fault.place[0]] = 1
        case "column comm":
            links_NN[:, fault.place[0]] = 1
        case "row":
            links_NN[fault.place[0]] = 1
        case "point":
            links_NN[fault.place] = 1
        case "tier":
            links_NN[node_of_rank_N[:, None] != node_of_rank_N] = 1
        case "node comp":
            ranks_N[node_of_rank_N == fault.place[0]] = 1
        case "node comm":
            links_NN[:, node_of_rank_N == fault.place[0]] = 1
        case "path":
            links_NN[_between(node_of_rank_N, fault.place)] = 1
        case _:
            raise ValueError(f"fault {fault.kind!r}: one of {', '.join(FAULTS)}")
    np.fill_diagonal(links_NN, 0)
    return ranks_N, links_NN


def _extra_of(job: ServingJob, usual: Usual, seed: int) -> _Extra:
    fault, num_windows, num = job.fault, job.num_windows, job.num_ranks
    none = _Extra(np.ones((num_windows, num)), np.zeros((num_windows, num, num)), np.ones(num_windows))
    if fault is None:
        return none
    on_W = np.zeros(num_windows)
    on_W[fault.windows[0] : fault.windows[1] + 1] = 1
    if fault.kind == "job":
        return _Extra(none.time_WN, none.latency_us_WNN, 1 + (fault.factor - 1) * on_W)
    ranks_N, links_NN = _places(fault, job.node_of_rank_N)
    if fault.kind == "early":
        return _Extra(1 + (fault.factor - 1) * on_W[:, None] * ranks_N, none.latency_us_WNN, none.everything_W)
    amount = _amount(fault, usual, ranks_N, links_NN, job.node_of_rank_N, seed)
    if ranks_N.any():
        return _Extra(1 + amount * on_W[:, None] * ranks_N, none.latency_us_WNN, none.everything_W)
    return _Extra(none.time_WN, amount * on_W[:, None, None] * links_NN, none.everything_W)


def _amount(
    fault: ServingFault, usual: Usual, ranks_N: np.ndarray, links_NN: np.ndarray, node_of_rank_N: np.ndarray, seed: int
) -> float:
    """Extra latency (us) or time (part of the usual) by which the waits at the place become `factor` times as long."""
    place_NN = links_NN > 0
    if ranks_N.any():  # others wait for these ranks, which do not wait for each other
        place_NN = (ranks_N == 0)[:, None] & (ranks_N > 0)
    elif fault.kind == "node comm":
        place_NN = place_NN & (node_of_rank_N[:, None] != fault.place[0])

    def wait_us(amount: float) -> float:
        shape = usual.latency_us_WNN.shape
        extra = _Extra(
            np.ones(shape[:2]) + (amount * ranks_N if ranks_N.any() else 0),
            np.zeros(shape) if ranks_N.any() else np.broadcast_to(amount * links_NN, shape),
            np.ones(len(usual.attention_us_WN)),
        )
        logged = _play(replace(usual, pause_us_WN=0 * usual.pause_us_WN), extra, seed)
        return float((logged.dispatch_us_WNN + logged.combine_us_WNN)[:, place_NN].mean())

    usual_us = wait_us(0.0)
    wanted_us = fault.factor * usual_us
    low, high = 0.0, 0.3 if ranks_N.any() else usual_us
    while wait_us(high) < wanted_us:
        low, high = high, 2 * high
    for _ in range(6):
        middle = (low + high) / 2
        low, high = (middle, high) if wait_us(middle) < wanted_us else (low, middle)
    return (low + high) / 2


def _play(usual: Usual, extra: _Extra, seed: int) -> _Logged:
    """Plays the calls of all windows side by side."""
    rng = np.random.default_rng(seed)
    num_windows, num = usual.attention_us_WN.shape
    latency_WNN = (usual.latency_us_WNN + extra.latency_us_WNN) * extra.everything_W[:, None, None]
    scale_WN = extra.time_WN * extra.everything_W[:, None]
    others = ~np.eye(num, dtype=bool)
    begin_WN = np.zeros((num_windows, num))
    dispatch_WNN, combine_WNN = np.zeros((2, num_windows, num, num))
    compute_WN, blocked_WN = np.zeros((2, num_windows, num))
    for _ in range(CALLS_PLAYED):
        work_WN = np.exp(0.03 * rng.standard_normal((num_windows, num))) * scale_WN
        sent_WN = begin_WN + work_WN * usual.attention_us_WN
        wait_WNN = sent_WN[:, None, :] + _jitter(rng, usual) * latency_WNN - sent_WN[:, :, None]
        waited_WN = _count(wait_WNN * others, dispatch_WNN)
        experts_WN = work_WN * usual.experts_us_WN
        done_WN = sent_WN + waited_WN + experts_WN
        wait_WNN = done_WN[:, None, :] + _jitter(rng, usual) * latency_WNN - done_WN[:, :, None]
        more_WN = _count(wait_WNN * others, combine_WNN)
        begin_WN = done_WN + more_WN
        compute_WN += experts_WN
        blocked_WN += waited_WN + more_WN
    # A pause is met by one call of thousands: all others wait for the rank once, for as long as it stops.
    pause_WNN = (usual.pause_us_WN / CALLS)[:, None, :] * others
    return _Logged(
        dispatch_WNN / CALLS_PLAYED + pause_WNN,
        combine_WNN / CALLS_PLAYED,
        compute_WN / CALLS_PLAYED,
        blocked_WN / CALLS_PLAYED + pause_WNN.max(axis=2),
        begin_WN.mean(axis=1) / CALLS_PLAYED + usual.pause_us_WN.sum(axis=1) / CALLS,
    )


def _count(wait_WNN: np.ndarray, total_WNN: np.ndarray) -> np.ndarray:
    """Adds the waits of a phase to the total; returns how long each rank waited at all."""
    np.maximum(wait_WNN, 0, out=wait_WNN)
    total_WNN += wait_WNN
    return wait_WNN.max(axis=2)


def _jitter(rng: np.random.Generator, usual: Usual) -> np.ndarray:
    """Of one message's latency; its mean is 1 without the tail."""
    shape = usual.latency_us_WNN.shape
    jitter_WNN = np.exp(usual.call_cv * rng.standard_normal(shape, dtype=np.float32) - usual.call_cv**2 / 2)
    if usual.tail_exponent:
        hit_WNN = rng.random(shape, dtype=np.float32) < 0.02
        tail = 5 * (1 - rng.random(int(hit_WNN.sum()))) ** (-1 / usual.tail_exponent)
        jitter_WNN[hit_WNN] *= np.minimum(tail, 200)
    return jitter_WNN


def _lines(job: ServingJob, usual: Usual, logged: _Logged) -> list[WindowRecord]:
    """A window has as many calls as its ten seconds hold."""
    num_calls_W = np.maximum(16, CALLS * logged.call_us_W[0] / logged.call_us_W).astype(int)
    tokens_WNN = (usual.tokens_WNN * num_calls_W[:, None, None]).astype(int)
    return [
        WindowRecord(
            window=job.first_window + w,
            t_start=1.76e9 + WINDOW_S * (job.first_window + w),
            t_end=1.76e9 + WINDOW_S * (job.first_window + w + 1),
            rank=rank,
            num_ranks=job.num_ranks,
            node_of_rank=tuple(job.node_of_rank_N.tolist()),
            num_calls=int(calls),
            dispatch_wait_us=tuple((logged.dispatch_us_WNN[w, rank] * calls).round(1).tolist()),
            combine_wait_us=tuple((logged.combine_us_WNN[w, rank] * calls).round(1).tolist()),
            recv_tokens=tuple(tokens_WNN[w, rank].tolist()),
            sent_tokens=tuple(tokens_WNN[w, :, rank].tolist()),
            compute_us=float(logged.compute_us_WN[w, rank] * calls),
            blocked_us=float(logged.blocked_us_WN[w, rank] * calls),
        )
        for w, calls in enumerate(num_calls_W)
        for rank in range(job.num_ranks)
    ]
