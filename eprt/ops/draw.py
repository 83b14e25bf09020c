"""One seeded draw per row of logits: temperature, truncation, inverse of the cumulative distribution."""

import numpy as np
import torch
from torch import Tensor

from eprt.ops import native, reference

_PARAMETERS = (("temperature", np.float32), ("min_p", np.float64), ("top_k", np.int64), ("top_p", np.float64))

# Logits that plain torch draws from at once: a dozen intermediates of this size, some fp64, exist at a time.
_BLOCK_ELEMENTS = 1 << 18


def draw(
    logits_XV: Tensor,
    row_Y: np.ndarray,
    *,
    temperature: np.ndarray,
    min_p: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    u: np.ndarray,
) -> Tensor:
    """int64 [Y]: a token for each of these rows.

    logits_XV: fp32. row_Y: int64, distinct or not. Per draw: temperature (float32, above 0); min_p (float64) drops
    tokens less likely than min_p times the most likely one; top_k (int64, 0: all) keeps the k most likely; top_p
    (float64) keeps the fewest most likely ones that reach top_p of what is left, lower ids first among equals;
    u (float64 in [0, 1)) chooses the first token at which the cumulative distribution exceeds it.

    On CPU a kernel of its own, elsewhere the oracle, block by block. A row of NaN or infinite logits gives some token.
    Raises ValueError for logits or rows of a wrong type, shape or value.
    """
    if logits_XV.dim() != 2 or logits_XV.dtype != torch.float32 or logits_XV.shape[1] == 0:
        raise ValueError(f"logits must be float32 [rows, vocabulary], got {logits_XV.dtype} {tuple(logits_XV.shape)}")
    if len(row_Y) and not 0 <= row_Y.min() <= row_Y.max() < len(logits_XV):
        raise ValueError(f"rows {row_Y.min()}..{row_Y.max()} were asked for; there are {len(logits_XV)}")
    given = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p, "u": u}
    for name, value in given.items():
        if value.shape != row_Y.shape:
            raise ValueError(f"{name} has shape {value.shape}, there are {len(row_Y)} rows to draw for")
    if not logits_XV.is_cpu:
        return _draw_in_blocks(logits_XV, row_Y, given)
    token_Y = torch.empty(len(row_Y), dtype=torch.int64)
    arrays = [np.ascontiguousarray(given[name], dtype=dtype) for name, dtype in (*_PARAMETERS, ("u", np.float64))]
    rows = np.ascontiguousarray(row_Y, dtype=np.int64)
    logits = logits_XV if logits_XV.stride(1) == 1 else logits_XV.contiguous()
    native.load().draw(logits, *map(torch.from_numpy, (rows, *arrays)), token_Y, torch.get_num_threads())
    return token_Y


def _draw_in_blocks(logits_XV: Tensor, row_Y: np.ndarray, given: dict[str, np.ndarray]) -> Tensor:
    """The oracle, some rows at a time."""
    size = max(1, _BLOCK_ELEMENTS // logits_XV.shape[1])
    blocks = [slice(start, start + size) for start in range(0, len(row_Y), size)]
    parts = [reference.draw(logits_XV, row_Y[b], **{name: value[b] for name, value in given.items()}) for b in blocks]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=logits_XV.device)
