"""Hyper-connections (DeepSeek-V4) on CPUs: residual streams become a sublayer's input, and take up its output.

M streams of H values, float32 or bfloat16. Everything is computed in fp32, each row alone: its bits depend neither on
the other rows nor on the number of threads. The formulas are in csrc/cpu/streams.h. Knows nothing of sublayers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.ops import native

MAX_STREAMS = 16
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class StreamProjection:
    """What the weights of streams are made of. All fp32 and contiguous."""

    fn_KW: Tensor  # [outputs, M * H]: M outputs to collapse, then M to expand and M * M to mix
    base_K: Tensor
    scale: Tensor  # [3]: of collapse, expand and mixture; [1] where there is nothing but a collapse
    eps: float  # added to the weights of a collapse and in every step of the mixture's normalisation
    norm_eps: float
    num_iterations: int = 0  # normalisations of the mixture's columns

    def __post_init__(self):
        tensors = self.fn_KW, self.base_K, self.scale
        right = all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)
        _check(right, "fn, base and scale must be contiguous torch.float32")


def mix_streams(x_TMH: Tensor, projection: StreamProjection) -> tuple[Tensor, Tensor, Tensor]:
    """(input of the sublayer [T, H], mixture of the streams fp32 [T, M, H], each stream's share of the output fp32
    [T, M]). ValueError when shapes or dtypes do not fit."""
    x_TMH = _checked(x_TMH, projection, 2 + x_TMH.shape[1], 3)
    mixed_TMH, post_TM = torch.empty(x_TMH.shape), torch.empty(x_TMH.shape[:2])
    return _mix(x_TMH, projection, mixed_TMH, post_TM), mixed_TMH, post_TM


def collapse_streams(x_TMH: Tensor, projection: StreamProjection) -> Tensor:
    """The sublayer's input alone, [T, H]."""
    return _mix(_checked(x_TMH, projection, 1, 1), projection, None, None)


def expand_streams(mixed_TMH: Tensor, post_TM: Tensor, y_TH: Tensor) -> Tensor:
    """mixed + post * y, in y's dtype."""
    T, M, H = mixed_TMH.shape
    _check(y_TH.shape == (T, H) and y_TH.dtype in _DTYPES, f"y is {y_TH.dtype} {tuple(y_TH.shape)}, not [{T}, {H}]")
    _check(post_TM.shape == (T, M), f"post has shape {tuple(post_TM.shape)}, must be [{T}, {M}]")
    _check(mixed_TMH.dtype == post_TM.dtype == torch.float32, "mixed and post must be torch.float32")
    out_TMH = torch.empty(T, M, H, dtype=y_TH.dtype)
    operands = (each.contiguous() for each in (mixed_TMH, post_TM, y_TH))
    native.load().stream_expand(*operands, out_TMH, torch.get_num_threads())
    return out_TMH


def _mix(x_TMH: Tensor, p: StreamProjection, mixed_TMH: Tensor | None, post_TM: Tensor | None) -> Tensor:
    row_TH = x_TMH.new_empty(x_TMH.shape[0], x_TMH.shape[2])
    if not len(x_TMH):
        return row_TH
    weights = p.fn_KW, p.base_K, p.scale, p.eps, p.norm_eps, p.num_iterations
    native.load().stream_mix(x_TMH, *weights, row_TH, mixed_TMH, post_TM, torch.get_num_threads())
    return row_TH


def _checked(x_TMH: Tensor, p: StreamProjection, outputs_per_stream: int, num_scales: int) -> Tensor:
    _check(x_TMH.dim() == 3 and x_TMH.dtype in _DTYPES, f"x is {x_TMH.dtype} {tuple(x_TMH.shape)}, must be [T, M, H]")
    _, M, H = x_TMH.shape
    _check(M <= MAX_STREAMS, f"there are {M} streams, more than {MAX_STREAMS}")
    want = (outputs_per_stream * M, M * H), (outputs_per_stream * M,), (num_scales,)
    tensors = p.fn_KW, p.base_K, p.scale
    have = tuple(tuple(tensor.shape) for tensor in tensors)
    _check(have == want, f"fn, base and scale have shapes {have}, must be {want}")
    return x_TMH.contiguous()


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
