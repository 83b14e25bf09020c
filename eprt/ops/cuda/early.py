"""Programmatic dependent launch of Triton kernels: their programs are in place when the preceding kernel ends.

Between two kernels of a stream, or of a recorded graph, no program runs for about a microsecond, or for less where the
second one is in place before. Knows nothing of what kernels compute.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_preceding(EARLY: tl.constexpr):
    """The first statement of a kernel launched with early(): behind it, all that earlier kernels wrote is there.

    Every program must execute it, also one that has nothing to do: the following kernel takes the end of this one for
    the end of all before it.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def early(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch, of a kernel that has EARLY: it starts early where the GPU can."""
    return _early(device.index) if device.type == "cuda" else {"EARLY": False}


@functools.cache
def _early(device: int) -> dict[str, Any]:
    starts_early = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": starts_early, "launch_pdl": starts_early}
