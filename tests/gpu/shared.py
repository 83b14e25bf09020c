"""Ranks that share a GPU, because there are fewer GPUs than ranks: what is not asked of them.

The GPU then runs the kernels of one process at a time, for a few milliseconds, and those of the others after it. So all
data goes its way, through the same kernels and mappings, but slowly, and never over NVLink; and a rank is waited for
whenever it is not its turn. What measures who is late, or looks at two ranks that work at once, says nothing there.
The rule: such a case has the mark `needs_own_gpu`, such a test `not_shared` (gpus.py); all others run.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from eprt import env

RANKS_PER_GPU = env.get("EPRT_RANKS_PER_GPU")


def needs_own_gpu(case: Callable[..., None]) -> Callable[..., None]:
    """A mark of a case, for `meaningful`."""
    vars(case)["needs_own_gpu"] = True
    return case


def meaningful(cases: Iterable[Callable[..., None]], ranks_per_gpu: int = RANKS_PER_GPU) -> Iterator[Any]:
    """All of them, or without those that need a GPU for each rank; says which are left out."""
    for case in cases:
        if ranks_per_gpu > 1 and hasattr(case, "needs_own_gpu"):
            print(f"{case.__name__}: left out, ranks share a GPU", flush=True)
        else:
            yield case
