"""From logits to tokens: bias, penalties, temperature, truncation, and one seeded draw per row.

Every row is treated by itself, so a token depends on its own logits, its request's parameters, seed, sample index and
output position, never on the batch, the rank or the step. Order, per row:

    logprobs       log-softmax of the raw logits
    logit_bias     added
    penalties      repetition: logits of tokens in prompt or output are divided by it where positive, multiplied where
                   negative; then frequency * count and presence are subtracted for generated tokens
    temperature 0  the largest logit, the lowest token id among equals; else logits are divided by it, and
    min_p          drops tokens less likely than min_p times the most likely one
    top_k          keeps the k most likely
    top_p          keeps the fewest most likely tokens that reach top_p of what is left
                   (top_k and top_p prefer the lower token id among equals)
    draw           inverts the cumulative distribution at u = Philox(seed; output position, sample_idx), see philox.py

One uniform number per token instead of one per vocabulary entry: no row pays for random numbers it does not use.
Suffixes: X rows of logits, V vocabulary, Y a subset of the rows.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from eprt.engine import philox
from eprt.engine.batch_rows import BatchRows
from eprt.engine.scheduler import SampledTokens

# Logits drawn from at once: a dozen intermediates of this size, some fp64, exist at a time.
_BLOCK_ELEMENTS = 1 << 18


def sample(logits_XV: Tensor, row_X: np.ndarray, rows: BatchRows) -> SampledTokens:
    """One token per row of the batch. logits_XV: fp32, changed in place. row_X: int64, each one's row in `rows`.

    A row whose largest logit is NaN or infinite gives -1.
    """
    params_X = rows.sampling_M[row_X]
    raw = _Logprobs.of(logits_XV, params_X["num_logprobs"])
    _apply_bias(logits_XV, row_X, params_X, rows)
    _apply_penalties(logits_XV, row_X, params_X, rows)
    value_X, token_X = logits_XV.max(dim=-1)
    token_X = torch.where(value_X.isfinite(), token_X, -1)
    position_X = rows.length_M[row_X] - rows.num_prompt_M[row_X]
    for drawn in _blocks(np.flatnonzero(params_X["temperature"]), logits_XV.shape[1]):
        drawn_Y = torch.from_numpy(drawn).to(logits_XV.device)
        chosen_Y = _draw(logits_XV[drawn_Y], params_X[drawn], position_X[drawn].astype(np.uint64))
        token_X[drawn_Y] = torch.where(token_X[drawn_Y] < 0, -1, chosen_Y)
    token_ids = token_X.cpu().numpy()
    return SampledTokens(token_ids) if raw is None else SampledTokens(token_ids, *raw.report(token_X))


def top_logprobs(logprob_XV: Tensor, num: int) -> list[tuple[tuple[int, float], ...]]:
    """The num most likely (token id, logprob) pairs of each row, best first."""
    if num == 0:
        return [()] * logprob_XV.shape[0]
    value_XK, token_XK = logprob_XV.topk(min(num, logprob_XV.shape[1]), dim=-1)
    return [tuple(zip(tokens, values)) for tokens, values in zip(token_XK.tolist(), value_XK.tolist())]


class _Logprobs:
    """Log-softmax of the raw logits of the rows that asked for it, kept until their tokens are known."""

    def __init__(self, logits_XV: Tensor, num_logprobs_X: np.ndarray):
        self.num_rows = len(num_logprobs_X)
        self.wanted = np.flatnonzero(num_logprobs_X >= 0)
        self.num_top = num_logprobs_X[self.wanted].tolist()
        self.wanted_Y = torch.from_numpy(self.wanted).to(logits_XV.device)
        self.logprob_YV = logits_XV[self.wanted_Y].log_softmax(dim=-1)

    @classmethod
    def of(cls, logits_XV: Tensor, num_logprobs_X: np.ndarray) -> "_Logprobs | None":
        return cls(logits_XV, num_logprobs_X) if (num_logprobs_X >= 0).any() else None

    def report(self, token_X: Tensor) -> tuple[list[float | None], list[tuple[tuple[int, float], ...]]]:
        chosen: list[float | None] = [None] * self.num_rows
        top: list[tuple[tuple[int, float], ...]] = [()] * self.num_rows
        token_Y1 = token_X[self.wanted_Y].clamp(min=0).unsqueeze(1)
        values = self.logprob_YV.gather(1, token_Y1).squeeze(1).tolist()
        pairs = top_logprobs(self.logprob_YV, max(self.num_top))
        for i, value, num, best in zip(self.wanted.tolist(), values, self.num_top, pairs):
            chosen[i], top[i] = value, best[:num]
        return chosen, top


def _blocks(rows: np.ndarray, vocab_size: int) -> Iterator[np.ndarray]:
    """The rows in blocks whose intermediate results stay small."""
    size = max(1, _BLOCK_ELEMENTS // vocab_size)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _apply_bias(logits_XV: Tensor, row_X: np.ndarray, params_X: np.ndarray, rows: BatchRows) -> None:
    for i in np.flatnonzero(params_X["has_bias"]).tolist():
        token_ids, bias = (torch.from_numpy(a).to(logits_XV.device) for a in rows.bias[int(row_X[i])])
        logits_XV[i, token_ids] += bias


def _apply_penalties(logits_XV: Tensor, row_X: np.ndarray, params_X: np.ndarray, rows: BatchRows) -> None:
    penalised = np.flatnonzero(params_X["has_penalty"])
    if not len(penalised):
        return
    device = logits_XV.device
    counts = [rows.counts[int(row_X[i])] for i in penalised.tolist()]
    generated_YV = torch.from_numpy(np.stack([c.generated_V for c in counts])).to(device)
    seen_YV = torch.from_numpy(np.stack([c.in_prompt_V for c in counts])).to(device) | (generated_YV > 0)
    params_Y = params_X[penalised]
    repetition_Y1 = _column(params_Y["repetition_penalty"], device)
    frequency_Y1 = _column(params_Y["frequency_penalty"], device)
    presence_Y1 = _column(params_Y["presence_penalty"], device)
    penalised_Y = torch.from_numpy(penalised).to(device)
    x_YV = logits_XV[penalised_Y]
    x_YV = torch.where(seen_YV, torch.where(x_YV > 0, x_YV / repetition_Y1, x_YV * repetition_Y1), x_YV)
    x_YV -= frequency_Y1 * generated_YV
    x_YV -= presence_Y1 * (generated_YV > 0)
    logits_XV[penalised_Y] = x_YV


def _column(values_Y: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values_Y.copy()).to(device).unsqueeze(1)


def _draw(logits_YV: Tensor, params_Y: np.ndarray, position_Y: np.ndarray) -> Tensor:
    """int64 [Y]: one token per row."""
    # Differences to the largest logit first: a tiny temperature then underflows to probability 0 and not to inf / inf.
    logits_YV = logits_YV - logits_YV.amax(dim=-1, keepdim=True)
    prob_YV = (logits_YV / _column(params_Y["temperature"], logits_YV.device)).softmax(dim=-1)
    if params_Y["min_p"].any():
        floor_Y1 = prob_YV.amax(dim=-1, keepdim=True) * _column(params_Y["min_p"], prob_YV.device)
        prob_YV.masked_fill_(prob_YV < floor_Y1, 0)
    top_k_Y, top_p_Y = params_Y["top_k"], params_Y["top_p"]
    cut = np.flatnonzero(((top_k_Y > 0) & (top_k_Y < prob_YV.shape[1])) | (top_p_Y < 1))
    if len(cut):
        cut_Z = torch.from_numpy(cut).to(prob_YV.device)
        prob_YV[cut_Z] = _truncate(prob_YV[cut_Z], top_k_Y[cut], top_p_Y[cut])
    cdf_YV = prob_YV.cumsum(dim=-1, dtype=torch.float64)
    u_Y = torch.from_numpy(philox.uniform(params_Y["seed"], params_Y["sample_idx"], position_Y)).to(cdf_YV.device)
    # The first token whose cumulative probability exceeds u: never one of probability 0.
    chosen_Y1 = torch.searchsorted(cdf_YV, u_Y.unsqueeze(1) * cdf_YV[:, -1:], right=True)
    return chosen_Y1.squeeze(1).clamp(max=cdf_YV.shape[1] - 1)


def _truncate(prob_YV: Tensor, top_k_Y: np.ndarray, top_p_Y: np.ndarray) -> Tensor:
    """Keeps top_k, then top_p of each row; the rest becomes 0. Both mean "the n largest", so one cut serves both."""
    vocab_size, device = prob_YV.shape[1], prob_YV.device
    k_Y1 = _column(np.where(top_k_Y > 0, np.minimum(top_k_Y, vocab_size), vocab_size), device)
    sorted_YV = _descending(prob_YV)
    mass_YV = sorted_YV.cumsum(dim=-1, dtype=torch.float64)
    wanted_Y1 = _column(top_p_Y, device) * mass_YV.gather(1, k_Y1 - 1)
    num_kept_Y1 = torch.minimum((mass_YV < wanted_Y1).sum(dim=-1, keepdim=True) + 1, k_Y1)
    least_Y1 = sorted_YV.gather(1, num_kept_Y1 - 1)
    dropped_YV = prob_YV < least_Y1
    tied_Z = (vocab_size - dropped_YV.sum(dim=-1) > num_kept_Y1.squeeze(1)).nonzero().squeeze(1)
    if len(tied_Z):
        equal_ZV = prob_YV[tied_Z] == least_Y1[tied_Z]
        num_above_Z1 = (prob_YV[tied_Z] > least_Y1[tied_Z]).sum(dim=-1, keepdim=True)
        dropped_YV[tied_Z] |= equal_ZV & (equal_ZV.cumsum(dim=-1) > num_kept_Y1[tied_Z] - num_above_Z1)
    return prob_YV.masked_fill_(dropped_YV, 0)


def _descending(prob_YV: Tensor) -> Tensor:
    """Each row's values, largest first. numpy sorts with vector instructions, some 30 times faster than torch."""
    if prob_YV.is_cpu:
        return torch.from_numpy(np.sort(prob_YV.numpy(), axis=-1)).flip(-1)
    return prob_YV.sort(dim=-1, descending=True).values
