"""The two parts of absorbed queries as one tensor, as some attention kernels take them. Knows no kernel."""

import torch
from torch import Tensor


def join(q_latent_TNL: Tensor, q_rope_TNR: Tensor) -> Tensor:
    """[T, N, L + R]: the memory they lie in, where one lies behind the other; else a copy."""
    T, N, L = q_latent_TNL.shape
    behind = q_rope_TNR.data_ptr() == q_latent_TNL.data_ptr() + L * q_latent_TNL.element_size()
    if behind and q_rope_TNR.stride() == q_latent_TNL.stride():
        joined = q_latent_TNL.as_strided((T, N, L + q_rope_TNR.shape[2]), q_latent_TNL.stride())
        if joined.is_contiguous():
            return joined
    return torch.cat((q_latent_TNL, q_rope_TNR), dim=-1)
