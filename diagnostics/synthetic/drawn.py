"""Drawn waits: every wait from a distribution (noises.py), multiplied where a fault or a burden lengthens it."""

from dataclasses import dataclass

import numpy as np

from ..windows.matrices import WindowMatrices
from .job import NODE_FACTOR, USUAL_COMPUTE_US, USUAL_TOKENS, USUAL_WAIT_US, PlantedFault, SyntheticJob
from .log_form import make_matrices
from .noises import NOISES

_DISPATCH_SHARE = 0.6  # of the waits


@dataclass(eq=False)
class _Drawn:
    """Per call."""

    wait_WNN: np.ndarray
    compute_WN: np.ndarray
    tokens_WNN: np.ndarray  # [w][i][j] rank i got from rank j


def draw_waits(job: SyntheticJob, rng: np.random.Generator) -> WindowMatrices:
    shape = (job.num_windows, job.num_ranks, job.num_ranks)
    node_N = job.node_of_rank_N
    base_NN = USUAL_WAIT_US * np.where(node_N[:, None] == node_N[None, :], 1.0, NODE_FACTOR)
    drawn = _Drawn(
        wait_WNN=base_NN * NOISES[job.noise](rng, shape, job.cv),
        compute_WN=USUAL_COMPUTE_US * NOISES["lognormal"](rng, shape[:2], 0.05),
        tokens_WNN=USUAL_TOKENS * NOISES["lognormal"](rng, shape, 0.1),
    )
    _add_burdens(job, rng, drawn)
    for fault in job.faults:
        _add_fault(drawn, job.windows_of(fault), fault)
    dispatch_WNN, combine_WNN = _DISPATCH_SHARE * drawn.wait_WNN, (1 - _DISPATCH_SHARE) * drawn.wait_WNN
    return make_matrices(job, dispatch_WNN, combine_WNN, drawn.tokens_WNN, drawn.compute_WN)


def _add_burdens(job: SyntheticJob, rng: np.random.Generator, drawn: _Drawn) -> None:
    """What is not a fault: uneven batches, idle ranks, a migration."""
    batch_N = rng.lognormal(0, job.batch_skew, job.num_ranks) if job.batch_skew else np.ones(job.num_ranks)
    late_N = np.sqrt(batch_N)  # half of a rank's time grows with its batch
    batch_N[list(job.idle)], late_N[list(job.idle)] = 0.0, 0.5
    drawn.tokens_WNN *= batch_N[None, None, :]
    drawn.wait_WNN *= late_N[None, None, :] / late_N[None, :, None]
    if job.migration is not None:
        w = job.migration
        drawn.wait_WNN[w] *= 1.5
        hit_NN = rng.random((job.num_ranks, job.num_ranks)) < 0.1
        drawn.wait_WNN[w] *= np.where(hit_NN, 4.0, 1.0)


def _add_fault(drawn: _Drawn, at: slice, fault: PlantedFault) -> None:
    kind, rank, factor = fault.kind, fault.rank, fault.factor
    place = {"column": (at, slice(None), rank), "row": (at, rank), "point": (at, fault.src, fault.dst)}[kind]
    drawn.wait_WNN[place] *= factor
    if kind == "column" and fault.cause != "comm":  # a rank that computes longer is late and waits for nobody
        drawn.wait_WNN[at, rank] /= factor
        drawn.compute_WN[at, rank] *= factor
    if fault.cause == "mixed":  # more tokens: hot experts, incast, a crowded link
        drawn.tokens_WNN[place if kind == "point" else (at, rank)] *= factor
