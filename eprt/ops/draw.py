"""One token per row of logits: the largest, or a draw by temperature, truncation and the inverse of the cumulative
distribution.

Knows no random generator: the caller draws u.
"""

import numpy as np
import torch
from torch import Tensor

from eprt.gpu.upload import upload
from eprt.ops import native

_PARAMETERS = (("temperature", np.float32), ("min_p", np.float64), ("top_k", np.int64), ("top_p", np.float64))

# Logits that plain torch processes at once: a dozen intermediates of this size, some fp64, exist at a time.
_BLOCK_ELEMENTS = 1 << 24


def largest(logits_XV: Tensor) -> Tensor:
    """int64 [X]: the token of each row's largest logit, the lowest among equals; -1 where a logit is NaN or the largest
    is infinite. logits_XV: fp32. A kernel looks on CPUs, torch elsewhere."""
    if not logits_XV.is_cpu:
        value_X, token_X = logits_XV.max(dim=-1)
        return torch.where(value_X.isfinite(), token_X, -1)
    _check_logits(logits_XV)
    token_X = torch.empty(len(logits_XV), dtype=torch.int64)
    logits = logits_XV if logits_XV.stride(1) == 1 else logits_XV.contiguous()
    native.load().largest(logits, token_X, torch.get_num_threads())
    return token_X


def _check_logits(logits_XV: Tensor) -> None:
    if logits_XV.dim() != 2 or logits_XV.dtype != torch.float32 or logits_XV.shape[1] == 0:
        raise ValueError(f"logits must be float32 [rows, vocabulary], got {logits_XV.dtype} {tuple(logits_XV.shape)}")


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

    logits_XV: fp32.
    row_Y: int64, a row of logits per draw; rows may recur.
    temperature: float32, above 0.
    min_p: float64; drops tokens less likely than min_p times the most likely one.
    top_k: int64; keeps the k most likely tokens; 0 keeps all.
    top_p: float64; keeps the fewest most likely tokens that reach top_p of the rest, lower ids first among equals.
    u: float64 in [0, 1); chooses the first token at which the cumulative distribution exceeds u.

    A kernel draws on CPUs, torch elsewhere, without waiting for the device. A row of NaN or infinite logits gives an
    arbitrary token. ValueError for logits or rows of a wrong dtype, shape or value.
    """
    _check_logits(logits_XV)
    if len(row_Y) and not 0 <= row_Y.min() <= row_Y.max() < len(logits_XV):
        raise ValueError(f"rows {row_Y.min()}..{row_Y.max()} were asked for; there are {len(logits_XV)}")
    given = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p, "u": u}
    for name, value in given.items():
        if value.shape != row_Y.shape:
            raise ValueError(f"{name} has shape {value.shape}, there are {len(row_Y)} rows to draw for")
    if not logits_XV.is_cpu:
        return draw_with_torch(logits_XV, row_Y, given)
    token_Y = torch.empty(len(row_Y), dtype=torch.int64)
    arrays = [np.ascontiguousarray(given[name], dtype=dtype) for name, dtype in (*_PARAMETERS, ("u", np.float64))]
    rows = np.ascontiguousarray(row_Y, dtype=np.int64)
    logits = logits_XV if logits_XV.stride(1) == 1 else logits_XV.contiguous()
    native.load().draw(logits, *map(torch.from_numpy, (rows, *arrays)), token_Y, torch.get_num_threads())
    return token_Y


def draw_with_torch(logits_XV: Tensor, row_Y: np.ndarray, given: dict[str, np.ndarray]) -> Tensor:
    """draw() on any device, in blocks of rows. given: draw()'s arrays by name."""
    arrays = [row_Y, *(np.asarray(given[name], dtype=dtype) for name, dtype in (*_PARAMETERS, ("u", np.float64)))]
    rows_Y, temperature_Y, min_p_Y, top_k_Y, top_p_Y, u_Y = upload(arrays, logits_XV.device)
    size = max(1, _BLOCK_ELEMENTS // logits_XV.shape[1])
    parts = []
    for b in (slice(start, start + size) for start in range(0, len(row_Y), size)):
        truncates = bool((given["top_k"][b] > 0).any() or (given["top_p"][b] < 1).any())
        prob_YV = kept_probs(logits_XV[rows_Y[b]], temperature_Y[b], min_p_Y[b], top_k_Y[b], top_p_Y[b], truncates)
        parts.append(draw_from(prob_YV, u_Y[b]))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=logits_XV.device)


def draw_from(prob_YV: Tensor, u_Y: Tensor) -> Tensor:
    """int64 [Y]: the first token whose cumulative probability exceeds u times the sum; never one of probability 0."""
    cdf_YV = prob_YV.cumsum(dim=-1, dtype=torch.float64)
    chosen_Y1 = torch.searchsorted(cdf_YV, u_Y.unsqueeze(1) * cdf_YV[:, -1:], right=True)
    return chosen_Y1.squeeze(1).clamp(max=cdf_YV.shape[1] - 1)


def kept_probs(
    logits_YV: Tensor, temperature_Y: Tensor, min_p_Y: Tensor, top_k_Y: Tensor, top_p_Y: Tensor, truncates: bool
) -> Tensor:
    """What draw() draws from: the probabilities of kept tokens, which do not sum to 1, and 0 for the others.

    truncates: whether any row has a top_k or top_p. Equals the oracle's draw_probs, but does not wait for the device.
    """
    logits_YV = logits_YV - logits_YV.amax(dim=-1, keepdim=True)
    prob_YV = (logits_YV / temperature_Y.unsqueeze(1)).softmax(dim=-1)
    prob_YV.masked_fill_(prob_YV < prob_YV.amax(dim=-1, keepdim=True) * min_p_Y.unsqueeze(1), 0)
    if not truncates:
        return prob_YV
    vocab_size = prob_YV.shape[1]
    k_Y1 = torch.where(top_k_Y > 0, top_k_Y.clamp(max=vocab_size), vocab_size).unsqueeze(1)
    # A stable sort: lower token ids come first among equals.
    sorted_YV, order_YV = prob_YV.sort(dim=-1, descending=True, stable=True)
    mass_YV = sorted_YV.cumsum(dim=-1, dtype=torch.float64)
    wanted_Y1 = top_p_Y.unsqueeze(1) * mass_YV.gather(1, k_Y1 - 1)
    num_kept_Y1 = torch.minimum((mass_YV < wanted_Y1).sum(dim=-1, keepdim=True) + 1, k_Y1)
    dropped_YV = torch.arange(vocab_size, device=prob_YV.device) >= num_kept_Y1
    return torch.zeros_like(prob_YV).scatter_(1, order_YV, sorted_YV.masked_fill_(dropped_YV, 0))
