"""From logits to tokens: bias, penalties, temperature, truncation, and one seeded draw per row.

Each row is processed by itself, so a token depends on its own logits, its request's parameters, seed, sample index and
output position, never on the batch, the rank or the step. Order, per row:

    logprobs       log-softmax of the raw logits
    logit_bias     added
    penalties      repetition: logits of tokens in prompt or output are divided by it where positive, multiplied where
                   negative; then frequency * count and presence are subtracted for generated tokens
    bans           of min_tokens, allowed_token_ids and bad words (token_bans.py)
    mask           drops what the request's grammar forbids (masks.py)
    temperature 0  the largest logit, the lowest token id among equals; else logits are divided by it, and
    min_p          drops tokens less likely than min_p times the most likely one
    top_k          keeps the k most likely
    top_p          keeps the fewest most likely tokens that reach top_p of what is left
                   (top_k and top_p prefer the lower token id among equals)
    draw           inverts the cumulative distribution at u = Philox(seed; output position, sample_idx), see philox.py

One random number per token instead of one per vocabulary entry: no row pays for random numbers that it does not use.
Suffixes: X rows of logits, V vocabulary, Y a subset of the rows.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eprt.engine import philox
from eprt.engine.acceptance import Acceptance
from eprt.engine.batch_rows import BatchRows
from eprt.engine.masks import Masks
from eprt.engine.outputs import Logprob, TopLogprobs
from eprt.engine.schedule import Drafts, SampledTokens
from eprt.engine.token_bans import apply_bans
from eprt.gpu.readback import HostSnapshot
from eprt.gpu.upload import upload
from eprt.ops.draw import draw, largest


@dataclass(frozen=True)
class Sample:
    """What a step has sampled, still on the device of the logits, or on its way to the host."""

    token_X: Tensor  # int64
    snapshot: HostSnapshot  # of token_X and what _Logprobs.of_tokens() gives
    logprobs: "_Logprobs | None"  # None where no request wants any

    def fetch(self) -> SampledTokens:
        """The tokens on the host: waits for them."""
        token_X, *values = self.snapshot.values()
        return SampledTokens(token_X, None if self.logprobs is None else self.logprobs.by_token(*values))


def launch(
    logits_XV: Tensor,
    row_X: np.ndarray,
    rows: BatchRows,
    *,
    last_token_M: Tensor | None = None,
    drafts: Drafts | None = None,
    acceptance: Acceptance | None = None,
    masks: Masks | None = None,
) -> Sample:
    """Samples one token per row of the batch. Does not wait for the logits.

    logits_XV: fp32, changed in place. row_X: int64, each one's row in `rows`. last_token_M: int64, on the logits'
    device, the last tokens of the rows where rows.unknown_M. drafts: where drafted tokens lie among the rows; None:
    nowhere. acceptance: accepts or rejects drafts where tokens are drawn; None: tokens are those without drafts.
    masks: of the rows with a grammar; None: there are none.

    A row whose largest logit is NaN or infinite gives -1: also one whose mask leaves no token.
    """
    params_X = rows.sampling_M[row_X]
    wants_logprobs = (params_X["num_logprobs"] >= 0).any()
    logprobs = _Logprobs(logits_XV, params_X["num_logprobs"]) if wants_logprobs else None
    _apply_bias(logits_XV, row_X, params_X, rows)
    _apply_penalties(logits_XV, row_X, params_X, rows, last_token_M)
    position_X = rows.length_M[row_X] - rows.num_prompt_M[row_X]
    if drafts is not None:
        position_X += drafts.offset_X
    apply_bans(logits_XV, row_X, position_X, rows, last_token_M)
    if masks is not None:
        masks.apply(logits_XV)
    token_X = largest(logits_XV)
    drawn = np.flatnonzero(params_X["temperature"])
    if len(drawn):
        (drawn_Y,) = upload([drawn], logits_XV.device)
        position_Y = position_X[drawn].astype(np.uint64)
        u_Y = philox.uniform(params_X["seed"][drawn], params_X["sample_idx"][drawn], position_Y)
        options = {name: params_X[name][drawn] for name in ("temperature", "min_p", "top_k", "top_p")}
        chosen_Y = draw(logits_XV, drawn, u=u_Y, **options)
        if drafts is not None and acceptance is not None:
            checked = np.flatnonzero(drafts.followed_X[drawn])
            at = drawn[checked]
            checked_Z, at_Z = upload([checked, at], logits_XV.device)
            places = (row_X[at], drafts.offset_X[at], position_Y[checked])
            chosen_Y[checked_Z] = acceptance.accept_or_redraw(logits_XV[at_Z], *places, u_Y[checked])
        token_X[drawn_Y] = torch.where(token_X[drawn_Y] < 0, -1, chosen_Y)
    wanted = [] if logprobs is None else logprobs.of_tokens(token_X)
    return Sample(token_X, HostSnapshot([token_X, *wanted]), logprobs)


def top_logprobs(logprob_XV: Tensor, num: int) -> list[TopLogprobs]:
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
        self.num_top = num_logprobs_X[self.wanted].tolist()  # how many of the likeliest tokens each of these rows wants
        (self.wanted_Y,) = upload([self.wanted], logits_XV.device)
        self.logprob_YV = logits_XV[self.wanted_Y].log_softmax(dim=-1)

    def of_tokens(self, token_X: Tensor) -> list[Tensor]:
        """Of the chosen tokens [Y], and of the likeliest ones: logprobs and token ids [Y, most that a row wants]."""
        token_Y1 = token_X[self.wanted_Y].clamp(min=0).unsqueeze(1)
        chosen_Y = self.logprob_YV.gather(1, token_Y1).squeeze(1)
        return [chosen_Y, *self.logprob_YV.topk(min(max(self.num_top), self.logprob_YV.shape[1]), dim=-1)]

    def by_token(self, chosen_Y: np.ndarray, top_YK: np.ndarray, top_token_YK: np.ndarray) -> list[Logprob | None]:
        """The values of of_tokens(), for each row of the step."""
        result: list[Logprob | None] = [None] * self.num_rows
        best = zip(top_token_YK.tolist(), top_YK.tolist())
        for i, value, num, (tokens, values) in zip(self.wanted.tolist(), chosen_Y.tolist(), self.num_top, best):
            result[i] = value, tuple(zip(tokens[:num], values[:num]))
        return result


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
    if last_token_M is not None:  # the host's counts lack it; -1, where logits were not numbers, ends its request
        last_Y1 = last_token_M[row_Y].clamp(min=0).unsqueeze(1)
        generated_YV = generated_YV.scatter_add(1, last_Y1, unknown_Y.unsqueeze(1))
    repetition_Y1, frequency_Y1, presence_Y1 = (penalty_Y.unsqueeze(1) for penalty_Y in penalties_Y)
    seen_YV = in_prompt_YV | (generated_YV > 0)
    x_YV = logits_XV[penalised_Y]
    x_YV = torch.where(seen_YV, torch.where(x_YV > 0, x_YV / repetition_Y1, x_YV * repetition_Y1), x_YV)
    x_YV -= frequency_Y1 * generated_YV
    x_YV -= presence_Y1 * (generated_YV > 0)
    logits_XV[penalised_Y] = x_YV
