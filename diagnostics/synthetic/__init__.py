"""Simulated jobs with planted faults, for the fault suite, tests and demonstrations. No product code uses them.

    job = SyntheticJob(num_ranks=16, faults=(PlantedFault("column", rank=3, factor=2.0),), seed=7)
    matrices = generate(job)                    # as read from a log
    records = records_of(matrices)              # to be written with WindowWriter

Two worlds. The plain noises draw every wait from a distribution and multiply the waits that a fault lengthens.
"arrivals" plays the calls of dispatch and combine one after the other, so that a late rank's row is low and a slow
link's lateness echoes in its receiver's column, as on a real machine.
"""

from .generate import generate
from .job import FAULT_KINDS, PlantedFault, SyntheticJob
from .log_form import records_of
from .noises import NOISES

__all__ = ["FAULT_KINDS", "NOISES", "PlantedFault", "SyntheticJob", "generate", "records_of"]
