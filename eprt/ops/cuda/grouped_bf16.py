"""The grouped product of bfloat16 rows with bfloat16 experts in large tiles, where its kernel runs and is the fastest.

From some rows per expert on, what grouped_gemm.py waits for is bytes from L2: its tiles read weights once for each 64
or 128 rows. The tiles of eprt/gpu/grouped_product.py hold all rows of most experts. Knows nothing of layers.
"""

import torch
from torch import Tensor

from eprt.gpu import grouped_product
from eprt.ops.cuda.grouped_gemm import count_sms
from eprt.ops.weight import Weight

LEAST_ROWS = 24  # per expert: from there on it was the fastest with 7168 x 2048 and with 4096 x 1536, on an H200


def grouped_bf16(
    x_RK: Tensor,
    w: Weight,
    recv_count_E: Tensor,
    matrix_E: Tensor | None,
    *,
    gated: bool = False,
    out_RN: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    expected_rows: int | None = None,
    num_sms: int | None = None,
    limit: float | None = None,
) -> Tensor | None:
    """As grouped_gemm's y [R, N], or None where grouped_gemm must, or should, compute it."""
    dtype = dtype if out_RN is None else out_RN.dtype
    R, num_experts = x_RK.shape[0], recv_count_E.shape[0]
    if not x_RK.dtype == w.data.dtype == dtype == torch.bfloat16:
        return None
    if min(R, expected_rows or R) < LEAST_ROWS * num_experts:
        return None
    if not grouped_product.can_multiply(x_RK, w.data, num_experts, gated):
        return None
    if not grouped_product.is_built(x_RK.device, gated):
        return None
    if out_RN is None:
        out_RN = x_RK.new_empty(R, w.shape[-2] // (2 if gated else 1))
    assert out_RN.is_contiguous()  # the kernel computes addresses
    num_sms = num_sms or count_sms(x_RK.device)
    grouped_product.grouped_product(x_RK, w.data, recv_count_E, matrix_E, out_RN, gated, num_sms, limit)
    return out_RN
