"""Absorbed queries as kernels of other memory layouts take them: both parts as one tensor, with the step's plan.

Knows no kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def prepare(
    q_latent_TNL: Tensor,
    q_rope_TNR: Tensor,
    plans: dict[str, Any] | None,
    kernel: str,
    make_plan: Callable[[Tensor], Any],
) -> tuple[Tensor, Any]:
    """(joined queries, the kernel's plan of the step).

    plans: of calls with the same lengths and shapes, by kernel; None: this call is alone.
    make_plan: makes the plan for joined queries, for the first of these calls.
    """
    plans, q_TND = {} if plans is None else plans, join(q_latent_TNL, q_rope_TNR)
    if kernel not in plans:
        plans[kernel] = make_plan(q_TND)
    return q_TND, plans[kernel]


def join(q_latent_TNL: Tensor, q_rope_TNR: Tensor) -> Tensor:
    """[T, N, L + R]: the memory they lie in, where one lies behind the other; else a copy."""
    T, N, L = q_latent_TNL.shape
    behind = q_rope_TNR.data_ptr() == q_latent_TNL.data_ptr() + L * q_latent_TNL.element_size()
    if behind and q_rope_TNR.stride() == q_latent_TNL.stride():
        joined = q_latent_TNL.as_strided((T, N, L + q_rope_TNR.shape[2]), q_latent_TNL.stride())
        if joined.is_contiguous():
            return joined
    return torch.cat((q_latent_TNL, q_rope_TNR), dim=-1)
