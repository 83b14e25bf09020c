"""What is usual in a simulated job: the speeds, batches, contexts, shares, latencies and pauses of its ranks and links.

Implements docs/diagnosis-noise.md. Knows nothing of faults (serving_job.py), nor of how anything is detected: it was
written before its author read the detector, and shares no code with it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

CALLS_PLAYED = 40  # of each window
CALLS = 5800  # of a window of ten seconds: 58 layers, 10 steps a second
UNSEEN_SEEDS = 100_000  # seeds from here on are never tuned on


@dataclass(frozen=True)
class Strengths:
    """How strong each kind of noise is in one job."""

    link_cv: float  # of a link's latency from window to window
    link_memory: float = 0.3  # how much of it the next window keeps
    tail_exponent: float = 0.0  # of the Pareto tail of a message's latency; 0: none
    context_growth: float = 0.0  # of a rank's contexts, a window
    day: float = 0.0  # how far the job's load rises and falls
    pauses_an_hour: float = 0.0  # of each rank
    share_cv: float = 0.05  # of the expert ranks' shares of the tokens
    share_memory: float = 1.0  # 1: shares stay as they are


def _everything(rng: np.random.Generator) -> Strengths:
    return Strengths(
        link_cv=rng.uniform(0.1, 0.25),
        link_memory=0.6,
        tail_exponent=rng.uniform(2.5, 4),
        context_growth=rng.uniform(0.01, 0.03),
        day=rng.uniform(0.15, 0.3),
        pauses_an_hour=rng.uniform(0.5, 5),
        share_cv=0.075,
        share_memory=0.95,
    )


def _steady(rng: np.random.Generator) -> Strengths:
    return Strengths(link_cv=rng.uniform(0.10, 0.25))


_FAMILIES: dict[str, Callable[[np.random.Generator], Strengths]] = {
    "steady": _steady,
    "heavy": lambda rng: Strengths(rng.uniform(0.1, 0.25), tail_exponent=rng.uniform(1.6, 2.5)),
    "autoregressive": lambda rng: Strengths(rng.uniform(0.1, 0.25), link_memory=rng.uniform(0.8, 0.95)),
    "contexts": lambda rng: Strengths(rng.uniform(0.1, 0.25), context_growth=rng.uniform(0.02, 0.06)),
    "diurnal": lambda rng: Strengths(rng.uniform(0.1, 0.25), day=rng.uniform(0.3, 0.6)),
    "pauses": lambda rng: Strengths(rng.uniform(0.1, 0.25), pauses_an_hour=rng.uniform(1, 10)),
    "experts": lambda rng: Strengths(rng.uniform(0.1, 0.25), share_cv=rng.uniform(0.1, 0.15), share_memory=0.9),
    "everything": _everything,
}
SEEN = ("steady", "heavy", "autoregressive", "contexts")
UNSEEN = ("diurnal", "pauses", "experts", "everything")


@dataclass(frozen=True)
class Usual:
    """One job's drawn conditions. W windows, N ranks; latencies [w][i][j]: what rank i receives from rank j."""

    attention_us_WN: np.ndarray  # of a call
    experts_us_WN: np.ndarray  # of a call
    latency_us_WNN: np.ndarray  # of a message, mean of the window
    pause_us_WN: np.ndarray  # all that a rank stops in the window
    tokens_WNN: np.ndarray  # of a call
    contexts_WN: np.ndarray  # tokens in the contexts of a rank's batch
    tail_exponent: float
    call_cv: float = 0.3  # of a message's latency in one call


def draw_usual(family: str, num_windows: int, node_of_rank_N: np.ndarray, rng: np.random.Generator) -> Usual:
    """ValueError for a family that does not exist."""
    if family not in _FAMILIES:
        raise ValueError(f"family {family!r}: one of {', '.join(_FAMILIES)}")
    strengths, num_ranks = _FAMILIES[family](rng), len(node_of_rank_N)
    day_W = 1 + strengths.day * np.sin(2 * np.pi * (np.arange(num_windows) / num_windows + rng.random()))
    batch_WN = 64 * day_W[:, None] * np.exp(0.1 * autoregressive(rng, 0.8, (num_windows, num_ranks)))
    contexts_WN = 2000.0 * batch_WN * _growth(rng, strengths.context_growth, (num_windows, num_ranks))
    speed_N = np.exp(0.015 * rng.standard_normal(num_ranks))
    share_WN = _shares(rng, strengths, (num_windows, num_ranks))
    tokens_WNN = batch_WN[:, None, :] * 8 * share_WN[:, :, None]
    rows_WN = tokens_WNN.sum(axis=2)
    attention_us_WN = speed_N * (150 + 0.1 * batch_WN + 20 * contexts_WN / (2000 * 64))
    experts_us_WN = speed_N * (60 + 0.06 * rows_WN)
    far_NN = node_of_rank_N[:, None] != node_of_rank_N
    lasting_NN = np.exp(0.05 * rng.standard_normal(far_NN.shape))
    wander_WNN = autoregressive(rng, strengths.link_memory, (num_windows, num_ranks, num_ranks))
    return Usual(
        attention_us_WN=attention_us_WN,
        experts_us_WN=experts_us_WN,
        latency_us_WNN=np.where(far_NN, 80.0, 25.0)
        * lasting_NN
        * np.exp(strengths.link_cv * wander_WNN)
        * (1 + 0.3 * (day_W - 1))[:, None, None],
        pause_us_WN=_pauses_us(rng, strengths.pauses_an_hour, (num_windows, num_ranks)),
        tokens_WNN=tokens_WNN,
        contexts_WN=contexts_WN,
        tail_exponent=strengths.tail_exponent,
    )


def autoregressive(rng: np.random.Generator, memory: float, shape: tuple[int, ...]) -> np.ndarray:
    """Of variance 1, along the first axis."""
    values = rng.standard_normal(shape)
    for w in range(1, shape[0]):
        values[w] = memory * values[w - 1] + np.sqrt(1 - memory**2) * values[w]
    return values


def _growth(rng: np.random.Generator, growth: float, shape: tuple[int, int]) -> np.ndarray:
    """Contexts of a rank grow for some windows, then its requests leave; ranks do so at different times."""
    length_N = rng.integers(8, 30, shape[1])
    age_WN = (np.arange(shape[0])[:, None] + rng.integers(0, 30, shape[1])) % length_N
    return 1 + growth * age_WN


def _shares(rng: np.random.Generator, strengths: Strengths, shape: tuple[int, int]) -> np.ndarray:
    """Share of each expert rank: its mean is 1 over the number of ranks."""
    wander_WN = autoregressive(rng, strengths.share_memory, shape)
    share_WN = np.exp(strengths.share_cv * wander_WN)
    return share_WN / share_WN.sum(axis=1, keepdims=True)


def _pauses_us(rng: np.random.Generator, an_hour: float, shape: tuple[int, int]) -> np.ndarray:
    num_WN = rng.poisson(an_hour / 360, shape)
    return num_WN * rng.uniform(5e3, 60e3, shape)
