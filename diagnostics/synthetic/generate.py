"""generate: the matrices of a synthetic job, from the world that its noise names. Everything follows from the seed."""

import numpy as np

from ..windows.matrices import WindowMatrices
from .arrivals import play_calls
from .drawn import draw_waits
from .job import FAULT_KINDS, SyntheticJob
from .noises import NOISES

_PLAYED_CALLS = 48  # of a window of "arrivals"


def generate(job: SyntheticJob) -> WindowMatrices:
    """ValueError for an unknown noise or a cause that the kind of fault cannot have."""
    for fault in job.faults:
        if (fault.kind, fault.cause) not in FAULT_KINDS:
            raise ValueError(f"no fault {fault.kind} with cause {fault.cause}: there are {sorted(FAULT_KINDS)}")
    if job.noise not in (*NOISES, "arrivals"):
        raise ValueError(f"noise={job.noise!r}: must be one of {', '.join(NOISES)} or arrivals")
    rng = np.random.default_rng([job.seed, job.num_ranks])
    return play_calls(job, rng, _PLAYED_CALLS) if job.noise == "arrivals" else draw_waits(job, rng)
