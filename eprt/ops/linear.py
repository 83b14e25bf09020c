"""Matrix products with (N, K) weights: dense layers, and the routed experts of a rank.

Batch-invariant: an output row depends on its own input row alone, whatever else is in the batch, so that sampling is
reproducible under any batch composition. Accumulation is fp32.
"""

from torch import Tensor

from eprt.ops import reference
from eprt.ops.weight import Weight


def linear(x_MK: Tensor, w_NK: Weight, bias_N: Tensor | None = None) -> Tensor:
    """y_MN = x W^T (+ bias). x: float32 or bfloat16 [M, K], M may be 0; y has x's dtype.

    fp8 and int8 weights are dequantised on the fly; activations stay in x's precision.
    """
    return reference.linear(x_MK, w_NK, bias_N)


def grouped_experts(x_RH: Tensor, recv_count_E: Tensor, w13: Weight, w2: Weight) -> Tensor:
    """SwiGLU experts over rows grouped by expert: y = (silu(x Wg^T) * (x Wu^T)) Wd^T.

    x_RH: float32 or bfloat16, rows of expert e contiguous and in order of e. recv_count_E: int32 [E], sum <= R
    (rows past the sum are left unspecified). w13: [E, 2I, H] (gate rows, then up rows). w2: [E, H, I]. Returns [R, H].
    """
    return reference.grouped_experts(x_RH, recv_count_E, w13, w2)
