"""SyntheticJob: what a made-up job is like, and the faults planted in it. Makes no figures itself (generate.py)."""

from dataclasses import dataclass

import numpy as np

NODE_FACTOR = 4.0  # waits between nodes over those inside
USUAL_WAIT_US, USUAL_COMPUTE_US, USUAL_TOKENS = 100.0, 200.0, 32.0  # per call
FAULT_KINDS = (  # (kind, cause)
    ("column", "comp"),
    ("column", "comm"),
    ("column", "mixed"),
    ("row", "comm"),
    ("row", "mixed"),
    ("point", "comm"),
    ("point", "mixed"),
)
CALLS = 5800  # of a window of ten seconds: 58 layers, 10 steps a second


@dataclass(frozen=True)
class PlantedFault:
    """A fault with its kind and place as in a Finding."""

    kind: str
    rank: int | None = None
    src: int | None = None
    dst: int | None = None
    factor: float = 2.0  # how many times the usual wait
    cause: str = "comm"  # one that the kind can have: FAULT_KINDS
    windows: tuple[int, int] | None = None  # the first and the last; None: all of the job


@dataclass(frozen=True)
class SyntheticJob:
    """Everything follows from the seed."""

    num_ranks: int = 8
    num_windows: int = 8
    seed: int = 0
    noise: str = "lognormal"  # one of noises.NOISES, or "arrivals"
    cv: float = 0.25  # coefficient of variation of a wait
    ranks_per_node: int | None = None
    faults: tuple[PlantedFault, ...] = ()
    batch_skew: float = 0.0  # standard deviation of the logarithm of the ranks' batch sizes
    idle: tuple[int, ...] = ()  # ranks without a token of their own
    migration: int | None = None  # window in which experts move: everybody waits longer, random links much longer

    @property
    def node_of_rank_N(self) -> np.ndarray:
        return np.arange(self.num_ranks) // (self.ranks_per_node or self.num_ranks)

    def windows_of(self, fault: PlantedFault) -> slice:
        """Positions of the windows in which the fault is on."""
        first, last = fault.windows or (0, self.num_windows - 1)
        return slice(first, last + 1)
