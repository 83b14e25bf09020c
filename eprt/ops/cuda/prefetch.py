"""Weights of a later product fetched into the L2 cache, while HBM has nothing else to do."""

import triton
import triton.language as tl
from torch import Tensor

_PIECE = 16 << 10  # bytes that one thread asks for at a time
_THREADS = 32


@triton.jit
def _prefetch(data, size, PIECE: tl.constexpr, THREADS: tl.constexpr):
    at = (tl.program_id(0) * THREADS + tl.arange(0, THREADS)).to(tl.int64) * PIECE
    bytes_left = tl.minimum(size - at, PIECE).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred some; setp.gt.s32 some, $2, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [data.to(tl.int64) + at, bytes_left],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def prefetch(weight: Tensor, num_bytes: int) -> None:
    """Asks for the first num_bytes of a contiguous tensor; returns, and the kernel ends, without waiting for them."""
    size = min(num_bytes, weight.nbytes) // 16 * 16
    if size:
        _prefetch[(triton.cdiv(size, _PIECE * _THREADS),)](weight, size, PIECE=_PIECE, THREADS=_THREADS, num_warps=1)
