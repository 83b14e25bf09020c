"""Made-up jobs with planted faults, for the fault suite, tests and demonstrations. Everything follows from the seed.

    job = Job(num_ranks=16, faults=(Fault("column", rank=3, factor=2.0),), seed=7)
    matrices = generate(job)                    # as read from a log
    records = records_of(matrices)              # to be written with WindowWriter

Two worlds. The plain ones draw every wait from a distribution (`noise`) and multiply what a fault lengthens. "arrivals"
plays the calls of dispatch and combine one after the other, so that a late rank's row is low and a slow link's lateness
echoes in its receiver's column, as on a real machine.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..log.events import WindowRecord
from ..windows.matrices import WindowMatrices

NODE_FACTOR = 4.0  # waits between nodes over those inside
USUAL_WAIT_US, USUAL_COMPUTE_US, USUAL_TOKENS = 100.0, 200.0, 32.0
CALLS = 5800  # of a window of ten seconds: 58 layers, 10 steps a second
_PLAYED_CALLS = 48  # of a window of "arrivals"


@dataclass(frozen=True)
class Fault:
    """kind and place as in a Finding. cause: what is behind it, one that the kind can have.

    factor: how many times the usual wait. windows: (first, last) it lasts, default to the end of the job.
    """

    kind: str
    rank: int | None = None
    src: int | None = None
    dst: int | None = None
    factor: float = 2.0
    cause: str = "comm"
    windows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Job:
    """cv: coefficient of variation of a wait. noise: one of NOISES, or "arrivals". batch_skew: deviation of the
    logarithm of the ranks' batch sizes. idle: ranks without a token of their own. migration: window in which
    experts move: everybody waits longer, links at random very much so.
    """

    num_ranks: int = 8
    num_windows: int = 8
    seed: int = 0
    noise: str = "lognormal"
    cv: float = 0.25
    ranks_per_node: int | None = None
    faults: tuple[Fault, ...] = ()
    batch_skew: float = 0.0
    idle: tuple[int, ...] = ()
    migration: int | None = None

    @property
    def node_of_rank_N(self) -> np.ndarray:
        return np.arange(self.num_ranks) // (self.ranks_per_node or self.num_ranks)


def generate(job: Job) -> WindowMatrices:
    """ValueError for an unknown noise or a cause that the kind of fault cannot have."""
    for fault in job.faults:
        if (fault.kind, fault.cause) not in _EFFECTS:
            raise ValueError(f"no fault {fault.kind} with cause {fault.cause}: there are {sorted(_EFFECTS)}")
    rng = np.random.default_rng([job.seed, job.num_ranks])
    if job.noise == "arrivals":
        from .arrivals import play

        return play(job, rng, _PLAYED_CALLS)
    if job.noise not in NOISES:
        raise ValueError(f"noise={job.noise!r}: must be one of {', '.join(NOISES)} or arrivals")
    shape = (job.num_windows, job.num_ranks, job.num_ranks)
    node_N = job.node_of_rank_N
    base_NN = USUAL_WAIT_US * np.where(node_N[:, None] == node_N[None, :], 1.0, NODE_FACTOR)
    state = _State(
        wait_WNN=base_NN * NOISES[job.noise](rng, shape, job.cv),
        compute_WN=USUAL_COMPUTE_US * NOISES["lognormal"](rng, shape[:2], 0.05),
        tokens_WNN=USUAL_TOKENS * NOISES["lognormal"](rng, shape, 0.1),
    )
    _burden(job, rng, state)
    for fault in job.faults:
        first, last = fault.windows or (0, job.num_windows - 1)
        _EFFECTS[fault.kind, fault.cause](state, slice(first, last + 1), fault)
    return state.matrices(job, split=0.6)


@dataclass(eq=False)
class _State:
    """Per call. tokens_WNN: [w][i][j] rank i got from rank j."""

    wait_WNN: np.ndarray
    compute_WN: np.ndarray
    tokens_WNN: np.ndarray

    def matrices(self, job: Job, split: float) -> WindowMatrices:
        """split: dispatch's share of the waits."""
        return matrices_of(job, split * self.wait_WNN, (1 - split) * self.wait_WNN, self.tokens_WNN, self.compute_WN)


def matrices_of(
    job: Job,
    dispatch_WNN: np.ndarray,
    combine_WNN: np.ndarray,
    tokens_WNN: np.ndarray,
    compute_WN: np.ndarray,
    blocked_WN: np.ndarray | None = None,
) -> WindowMatrices:
    own = np.eye(job.num_ranks, dtype=bool)
    start_s_W = 1.76e9 + 10.0 * np.arange(job.num_windows)
    return WindowMatrices(
        np.arange(job.num_windows), start_s_W, start_s_W + 10, job.node_of_rank_N,
        np.where(own, 0.0, dispatch_WNN), np.where(own, 0.0, combine_WNN), tokens_WNN, tokens_WNN.transpose(0, 2, 1),
        compute_WN, np.full(compute_WN.shape, float(CALLS)), {},
        blocked_us_WN=np.full(compute_WN.shape, np.nan) if blocked_WN is None else blocked_WN,
    )  # fmt: skip


def records_of(matrices: WindowMatrices) -> list[WindowRecord]:
    """By window, then rank; totals of CALLS calls."""
    num_ranks = matrices.num_ranks

    def total(values: np.ndarray) -> list[float]:
        return (values * CALLS).round(1).tolist()

    return [
        WindowRecord(
            window=int(window),
            t_start=float(matrices.start_s_W[w]),
            t_end=float(matrices.end_s_W[w]),
            rank=rank,
            num_ranks=num_ranks,
            node_of_rank=tuple(matrices.node_of_rank_N.tolist()),
            num_calls=CALLS,
            dispatch_wait_us=tuple(total(matrices.dispatch_us_WNN[w, rank])),
            combine_wait_us=tuple(total(matrices.combine_us_WNN[w, rank])),
            recv_tokens=tuple((matrices.recv_tokens_WNN[w, rank] * CALLS).astype(int).tolist()),
            compute_us=float(matrices.compute_us_WN[w, rank] * CALLS),
            sent_tokens=tuple((matrices.sent_tokens_WNN[w, rank] * CALLS).astype(int).tolist()),
            blocked_us=None if math.isnan(blocked := matrices.blocked_us_WN[w, rank]) else float(blocked * CALLS),
        )
        for w, window in enumerate(matrices.window_W)
        for rank in range(num_ranks)
    ]


# ---- what is no fault -----------------------------------------------------------------------------------------------


def _burden(job: Job, rng: np.random.Generator, state: _State) -> None:
    """Uneven batches, idle ranks, a migration."""
    batch_N = rng.lognormal(0, job.batch_skew, job.num_ranks) if job.batch_skew else np.ones(job.num_ranks)
    late_N = np.sqrt(batch_N)  # half of a rank's time grows with its batch
    batch_N[list(job.idle)], late_N[list(job.idle)] = 0.0, 0.5
    state.tokens_WNN *= batch_N[None, None, :]
    state.wait_WNN *= late_N[None, None, :] / late_N[None, :, None]
    if job.migration is not None:
        w = job.migration
        state.wait_WNN[w] *= 1.5
        hit_NN = rng.random((job.num_ranks, job.num_ranks)) < 0.1
        state.wait_WNN[w] *= np.where(hit_NN, 4.0, 1.0)


# ---- faults ---------------------------------------------------------------------------------------------------------


def _late_rank(state: _State, at: slice, fault: Fault) -> None:
    """Others wait for it, it waits for nobody."""
    state.wait_WNN[at, :, fault.rank] *= fault.factor
    state.wait_WNN[at, fault.rank, :] /= fault.factor
    state.compute_WN[at, fault.rank] *= fault.factor


def _slow_sender(state: _State, at: slice, fault: Fault) -> None:
    state.wait_WNN[at, :, fault.rank] *= fault.factor


def _crowded_rank(state: _State, at: slice, fault: Fault) -> None:
    """Hot experts: it gets more tokens, computes longer, comes late."""
    _late_rank(state, at, fault)
    state.tokens_WNN[at, fault.rank, :] *= fault.factor


def _slow_receiver(state: _State, at: slice, fault: Fault) -> None:
    state.wait_WNN[at, fault.rank, :] *= fault.factor


def _incast(state: _State, at: slice, fault: Fault) -> None:
    """Everybody sends it more than to the others, and its waits grow with that."""
    state.wait_WNN[at, fault.rank, :] *= fault.factor
    state.tokens_WNN[at, fault.rank, :] *= fault.factor


def _slow_link(state: _State, at: slice, fault: Fault) -> None:
    state.wait_WNN[at, fault.src, fault.dst] *= fault.factor


def _crowded_link(state: _State, at: slice, fault: Fault) -> None:
    state.wait_WNN[at, fault.src, fault.dst] *= fault.factor
    state.tokens_WNN[at, fault.src, fault.dst] *= fault.factor


_EFFECTS: dict[tuple[str, str], Callable[[_State, slice, Fault], None]] = {
    ("column", "comp"): _late_rank,
    ("column", "comm"): _slow_sender,
    ("column", "mixed"): _crowded_rank,
    ("row", "comm"): _slow_receiver,
    ("row", "mixed"): _incast,
    ("point", "comm"): _slow_link,
    ("point", "mixed"): _crowded_link,
}
FAULT_KINDS = tuple(_EFFECTS)


# ---- noise ----------------------------------------------------------------------------------------------------------
# (rng, shape, coefficient of variation) -> positive factors of median about 1; the first axis is time.


def _lognormal(rng: np.random.Generator, shape: tuple[int, ...], cv: float) -> np.ndarray:
    return rng.lognormal(0, _sigma(cv), shape)


def _gamma(rng: np.random.Generator, shape: tuple[int, ...], cv: float) -> np.ndarray:
    k = 1 / cv**2
    return rng.gamma(k, 1 / k, shape)


def _heavy(rng: np.random.Generator, shape: tuple[int, ...], cv: float) -> np.ndarray:
    """Student's t with three degrees of freedom in the logarithm: of the same middle, with far outliers."""
    return np.exp(np.clip(_sigma(cv) * 0.85 * rng.standard_t(3, shape), -4, 4))


def _autocorrelated(rng: np.random.Generator, shape: tuple[int, ...], cv: float) -> np.ndarray:
    """Noise that stays for about three windows (AR(1), 0.7)."""
    rho, fresh = 0.7, rng.standard_normal(shape)
    for w in range(1, shape[0]):
        fresh[w] = rho * fresh[w - 1] + math.sqrt(1 - rho**2) * fresh[w]
    return np.exp(_sigma(cv) * fresh)


def _sigma(cv: float) -> float:
    return math.sqrt(math.log(1 + cv**2))


NOISES: dict[str, Callable[..., np.ndarray]] = {
    "lognormal": _lognormal,
    "gamma": _gamma,
    "heavy": _heavy,
    "autocorrelated": _autocorrelated,
}
