"""Linear: one matrix product, with its weight in the format it is kept in; and how a checkpoint's matrix gets there.

Formats: "same" (the model's dtype), "fp8" (e4m3, one scale per 128x128 block), "int8" (one scale per output row), "fp4"
(e2m1, two values to a byte, one power of 2 per 32 columns).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from eprt import ops
from eprt.layers.norm import RMSNorm
from eprt.ops.weight import BLOCK, Weight, quantize_fp4, quantize_fp8, quantize_int8

Matrix = Tensor | Weight  # in whatever format a checkpoint has it


class Linear:
    """y = x W^T (+ bias), x: [T, K]. Rows do not depend on each other: see ops.linear."""

    def __init__(self, weight: Weight, bias_N: Tensor | None = None):
        self.weight = weight
        self.bias_N = None if bias_N is None else bias_N.float().contiguous()

    def __call__(self, x_TK: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """out_dtype: default x's."""
        return ops.linear(x_TK, self.weight, self.bias_N, out_dtype)

    def of_norm(self, x_TK: Tensor, norm: RMSNorm) -> Tensor:
        """Of norm(x)."""
        return ops.norm_linear(x_TK, norm.weight_H, norm.eps, self.weight, self.bias_N)


class JoinedLinear:
    """Several matrices times the same rows: one product, where they can lie behind each other in memory."""

    def __init__(self, parts: Sequence[Linear]):
        self.parts, self.sizes = list(parts), [part.weight.shape[0] for part in parts]
        if _can_be_joined(parts):
            self.parts = [_joined(parts)]

    def __call__(self, x_TK: Tensor) -> Sequence[Tensor]:
        """Each one's product. Rows lie apart."""
        if len(self.parts) == 1:
            return self.parts[0](x_TK).split(self.sizes, dim=-1)
        return [part(x_TK) for part in self.parts]

    def in_fp32(self, x_TK: Tensor) -> Sequence[Tensor]:
        """fp32 products of plain weights, with nothing rounded. On GPUs those of bf16 are exact in fp32 sums anyway."""
        if x_TK.is_cuda and all(part.weight.data.dtype == x_TK.dtype for part in self.parts):
            products = [part(x_TK, torch.float32) for part in self.parts]
            return products[0].split(self.sizes, dim=-1) if len(self.parts) == 1 else products
        return self(x_TK.float())

    def of_norm(self, x_TK: Tensor, norm: RMSNorm) -> Sequence[Tensor]:
        """The products with norm(x)."""
        if len(self.parts) == 1:
            return self.parts[0].of_norm(x_TK, norm).split(self.sizes, dim=-1)
        return self(norm(x_TK))


def _can_be_joined(parts: Sequence[Linear]) -> bool:
    """One dtype, and no fp8 block that would span two of them."""
    dtypes = {part.weight.data.dtype for part in parts}
    is_fp8 = torch.float8_e4m3fn in dtypes
    return len(dtypes) == 1 and not (is_fp8 and any(part.weight.shape[0] % BLOCK for part in parts[:-1]))


def _joined(parts: Sequence[Linear]) -> Linear:
    data_NK = torch.cat([part.weight.data.view(torch.uint8) for part in parts]).view(parts[0].weight.data.dtype)
    scales = [part.weight.scale for part in parts if part.weight.scale is not None]
    weight, bias_N = Weight(data_NK, torch.cat(scales) if scales else None), None
    if any(part.bias_N is not None for part in parts):
        none = [torch.zeros(part.weight.shape[0], device=data_NK.device) for part in parts]
        bias_N = torch.cat([zero if part.bias_N is None else part.bias_N for part, zero in zip(parts, none)])
    return Linear(weight, bias_N)


def as_format(weight: Matrix, weight_format: str, dtype: torch.dtype) -> Weight:
    """The matrix (or stack of matrices) in a format. An fp8 weight asked for as fp8 stays as it is, bit for bit."""
    if isinstance(weight, Tensor):
        weight = plain_weight(weight)
    if weight_format == "same":
        if weight.data.dtype == dtype:
            return Weight(weight.data.contiguous())
        return Weight(weight.dequantize().to(dtype).contiguous())
    if weight_format == "fp8":
        return weight if weight.data.dtype == torch.float8_e4m3fn else quantize_fp8(weight.dequantize())
    if weight_format == "int8":
        return weight if weight.data.dtype == torch.int8 else quantize_int8(weight.dequantize())
    if weight_format == "fp4":
        return weight if weight.is_fp4 else quantize_fp4(weight.dequantize())
    raise ValueError(f"weight format {weight_format!r}: must be same, fp8, int8 or fp4")


def moved_weight(weight: Weight, dtype: torch.dtype, device: torch.device) -> Weight:
    """On another device, and in the dtype unless it is quantised."""
    if weight.scale is None:
        return Weight(weight.data.to(device, dtype))
    return Weight(weight.data.to(device), weight.scale.to(device))


def plain_weight(data: Tensor) -> Weight:
    """A float16 matrix becomes float32: the kernels take no float16, and bfloat16 would round it."""
    return Weight(data if data.dtype in (torch.float32, torch.bfloat16) else data.float())


def padded_intermediate_size(intermediate_size: int, weight_format: str) -> int:
    """Rows of gate (and of up) as stored: whole blocks for fp8, so that no block spans gate and up rows."""
    return -(-intermediate_size // BLOCK) * BLOCK if weight_format == "fp8" else intermediate_size


def swiglu_weights(
    gate_IH: Matrix, up_IH: Matrix, down_HI: Matrix, weight_format: str, dtype: torch.dtype
) -> tuple[Weight, Weight]:
    """(w13 [2I', H]: gate rows, then up rows; w2 [H, I']) of one SwiGLU, I' = padded_intermediate_size. The padding is
    zero: it adds silu(0) * 0 to every sum."""
    gate, up, down = (as_format(w, weight_format, dtype) for w in (gate_IH, up_IH, down_HI))
    missing = padded_intermediate_size(gate.shape[0], weight_format) - gate.shape[0]
    if missing:
        gate, up = (Weight(_pad_zero(w.data, 0, missing), w.scale) for w in (gate, up))
        down = Weight(_pad_zero(down.data, missing, 0), down.scale)
    scale = None if gate.scale is None or up.scale is None else torch.cat((gate.scale, up.scale))
    return Weight(torch.cat((gate.data, up.data)), scale), down


def split_swiglu(w13: Weight, w2: Weight, intermediate_size: int) -> tuple[Weight, Weight, Weight]:
    """Gate, up and down as views of what swiglu_weights made, without the padding."""
    half = w13.shape[0] // 2
    gate_rows, up_rows = slice(0, intermediate_size), slice(half, half + intermediate_size)
    down = Weight(w2.data if w2.is_fp4 else w2.data[:, :intermediate_size], w2.scale)
    if w13.scale is None:
        return Weight(w13.data[gate_rows]), Weight(w13.data[up_rows]), down
    if w13.data.dtype == torch.float8_e4m3fn:
        gate_scale, up_scale = w13.scale.chunk(2)
    else:
        gate_scale, up_scale = w13.scale[gate_rows], w13.scale[up_rows]
    return Weight(w13.data[gate_rows], gate_scale), Weight(w13.data[up_rows], up_scale), down


def _pad_zero(data_NK: Tensor, columns: int, rows: int) -> Tensor:
    # torch cannot pad e4m3; all-zero bits are +0.
    return F.pad(data_NK.view(torch.uint8), (0, columns, 0, rows)).view(data_NK.dtype)
