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

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eprt.engine import philox
from eprt.engine.acceptance import Acceptance
from eprt.engine.batch_rows import BatchRows
from eprt.engine.schedule import Drafts, SampledTokens
from eprt.gpu.readback import HostSnapshot
from eprt.gpu.upload import upload
from eprt.ops.draw import draw


@dataclass(frozen=True)
class Sample:
    """What a step has sampled, still on the device of the logits, or on its way to the host."""

    token_X: Tensor  # int64
    snapshot: HostSnapshot
    logprobs: "_Logprobs | None"

    def fetch(self) -> SampledTokens:
        """Waits for it."""
        token_X, *logprobs = self.snapshot.values()
        if self.logprobs is None:
            return SampledTokens(token_X)
        return SampledTokens(token_X, *self.logprobs.report(*logprobs))


def launch(
    logits_XV: Tensor,
    row_X: np.ndarray,
    rows: BatchRows,
    *,
    last_token_M: Tensor | None = None,
    drafts: Drafts | None = None,
    acceptance: Acceptance | None = None,
) -> Sample:
    """Samples one token per row of the batch. Does not wait for the logits.

    logits_XV: fp32, changed in place. row_X: int64, each one's row in `rows`. last_token_M: int64, on the logits'
    device, the last tokens of the rows where rows.unknown_M. drafts: where drafted tokens lie among the rows; default
    nowhere. acceptance: chooses whether they hold where tokens are drawn; without, tokens are those without drafts.

    A row whose largest logit is NaN or infinite gives -1.
    """
    params_X = rows.sampling_M[row_X]
    logprobs = _Logprobs.of(logits_XV, params_X["num_logprobs"])
    _apply_bias(logits_XV, row_X, params_X, rows)
    _apply_penalties(logits_XV, row_X, params_X, rows, last_token_M)
    value_X, token_X = logits_XV.max(dim=-1)
    token_X = torch.where(value_X.isfinite(), token_X, -1)
    position_X = rows.length_M[row_X] - rows.num_prompt_M[row_X]
    if drafts is not None:
        position_X += drafts.offset_X
    drawn = np.flatnonzero(params_X["temperature"])
    if len(drawn):
        (drawn_Y,) = upload([drawn], logits_XV.device)
        position_Y = position_X[drawn].astype(np.uint64)
        u_Y = philox.uniform(params_X["seed"][drawn], params_X["sample_idx"][drawn], position_Y)
        chosen_Y = _draw(logits_XV, drawn, params_X[drawn], u_Y)
        if drafts is not None and acceptance is not None:
            checked = np.flatnonzero(drafts.followed_X[drawn])
            at = drawn[checked]
            checked_Z, at_Z = upload([checked, at], logits_XV.device)
            places = (row_X[at], drafts.offset_X[at], position_Y[checked])
            chosen_Y[checked_Z] = acceptance.decide(logits_XV[at_Z], *places, u_Y[checked])
        token_X[drawn_Y] = torch.where(token_X[drawn_Y] < 0, -1, chosen_Y)
    wanted = [] if logprobs is None else logprobs.of_tokens(token_X)
    return Sample(token_X, HostSnapshot([token_X, *wanted]), logprobs)


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
        (self.wanted_Y,) = upload([self.wanted], logits_XV.device)
        self.logprob_YV = logits_XV[self.wanted_Y].log_softmax(dim=-1)

    @classmethod
    def of(cls, logits_XV: Tensor, num_logprobs_X: np.ndarray) -> "_Logprobs | None":
        return cls(logits_XV, num_logprobs_X) if (num_logprobs_X >= 0).any() else None

    def of_tokens(self, token_X: Tensor) -> list[Tensor]:
        """Of the chosen tokens [Y], and of the most likely ones: logprobs and token ids [Y, most that a row wants]."""
        token_Y1 = token_X[self.wanted_Y].clamp(min=0).unsqueeze(1)
        chosen_Y = self.logprob_YV.gather(1, token_Y1).squeeze(1)
        return [chosen_Y, *self.logprob_YV.topk(min(max(self.num_top), self.logprob_YV.shape[1]), dim=-1)]

    def report(
        self, chosen_Y: np.ndarray, top_YK: np.ndarray, top_token_YK: np.ndarray
    ) -> tuple[list[float | None], list[tuple[tuple[int, float], ...]]]:
        chosen: list[float | None] = [None] * self.num_rows
        top: list[tuple[tuple[int, float], ...]] = [()] * self.num_rows
        best = zip(top_token_YK.tolist(), top_YK.tolist())
        for i, value, num, (tokens, values) in zip(self.wanted.tolist(), chosen_Y.tolist(), self.num_top, best):
            chosen[i], top[i] = value, tuple(zip(tokens[:num], values[:num]))
        return chosen, top


def _apply_bias(logits_XV: Tensor, row_X: np.ndarray, params_X: np.ndarray, rows: BatchRows) -> None:
    for i in np.flatnonzero(params_X["has_bias"]).tolist():
        token_ids, bias = upload(rows.bias[int(row_X[i])], logits_XV.device)
        logits_XV[i, token_ids] += bias


def _apply_penalties(
    logits_XV: Tensor, row_X: np.ndarray, params_X: np.ndarray, rows: BatchRows, last_token_M: Tensor | None
) -> None:
    penalised = np.flatnonzero(params_X["has_penalty"])
    if not len(penalised):
        return
    params_Y, row_Y = params_X[penalised], row_X[penalised]
    counts = [rows.counts[row] for row in row_Y.tolist()]
    arrays = [penalised, row_Y, rows.unknown_M[row_Y].astype(np.int32)]
    arrays += [np.stack([c.generated_V for c in counts]), np.stack([c.in_prompt_V for c in counts])]
    arrays += [params_Y[f"{name}_penalty"].copy() for name in ("repetition", "frequency", "presence")]
    penalised_Y, row_Y, unknown_Y, generated_YV, in_prompt_YV, *penalties_Y = upload(arrays, logits_XV.device)
    if last_token_M is not None:  # the host's counts lack it; -1, no number, ends its request
        last_Y1 = last_token_M[row_Y].clamp(min=0).unsqueeze(1)
        generated_YV = generated_YV.scatter_add(1, last_Y1, unknown_Y.unsqueeze(1))
    repetition_Y1, frequency_Y1, presence_Y1 = (penalty_Y.unsqueeze(1) for penalty_Y in penalties_Y)
    seen_YV = in_prompt_YV | (generated_YV > 0)
    x_YV = logits_XV[penalised_Y]
    x_YV = torch.where(seen_YV, torch.where(x_YV > 0, x_YV / repetition_Y1, x_YV * repetition_Y1), x_YV)
    x_YV -= frequency_Y1 * generated_YV
    x_YV -= presence_Y1 * (generated_YV > 0)
    logits_XV[penalised_Y] = x_YV


def _draw(logits_XV: Tensor, row_Y: np.ndarray, params_Y: np.ndarray, u_Y: np.ndarray) -> Tensor:
    """int64 [Y]: one token for each of these rows."""
    truncation = {name: params_Y[name] for name in ("temperature", "min_p", "top_k", "top_p")}
    return draw(logits_XV, row_Y, u=u_Y, **truncation)
