"""Rejection sampling of drafts: it accepts more drafts than comparing them with tokens sampled as without drafts, most
of all where the model is unsure, and the tokens still follow the model's distribution.

A draft x is drawn from q, the MTP layer's distribution under the request's temperature and truncation, and accepted
with probability min(1, p(x) / q(x)), where p is the model's; else the token is drawn from max(0, p - q), normalised
(Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", arXiv:2211.17192, section 2).
A token so drawn never equals the rejected draft, for p(x) < q(x) there, so whoever compares tokens with drafts sees
which drafts were accepted.

Random numbers depend on the request's seed and the token's position (philox.py). A draft and its acceptance have a
stream each; a token that replaces a rejected draft uses the stream of tokens without drafts. A request gives the same
tokens in each run with the same drafts, but other ones than without drafts; greedy requests give the same either way.
Suffixes: Y rows with temperature, V vocabulary, M rows and K drafts of BatchRows.
"""

import numpy as np
import torch
from torch import Tensor

from eprt.engine import philox
from eprt.engine.batch_rows import BatchRows
from eprt.gpu.upload import upload
from eprt.ops.draw import draw_from, kept_probs

# Beyond any sample_idx, which is the stream of tokens without drafts.
_DRAFTING, _ACCEPTING = np.uint64(1 << 20), np.uint64(2 << 20)


class Acceptance:
    """Draws drafts, and accepts or rejects them. token_MK: int64, on the device, the latest drafts of each row."""

    def __init__(self, rows: BatchRows, token_MK: Tensor):
        self._rows, self._token_MK = rows, token_MK
        # fp32: what the latest drafts of each row with a temperature were drawn from.
        self._prob_MKV = torch.zeros(*token_MK.shape, rows.vocab_size, device=token_MK.device)

    def draw_drafts(self, logits_SV: Tensor, token_S: Tensor, row_S: np.ndarray, k: int, num_new_S: Tensor) -> Tensor:
        """int64 [S]: the k-th draft of each of these rows; for greedy requests token_S, the likeliest.

        num_new_S: int64, on the device, how many tokens the row gets before its first draft: at most one more than
        there are drafts. The host does not know it, so it sends the random number of each case.
        """
        rows = self._rows
        drawn = np.flatnonzero(rows.sampling_M["temperature"][row_S])
        if not len(drawn):
            return token_S
        row_Y, params_Y = row_S[drawn], rows.sampling_M[row_S[drawn]]
        first_Y = rows.length_M[row_Y] - rows.num_prompt_M[row_Y] + k
        position_YN = (first_Y[:, None] + np.arange(rows.num_drafts + 2)).astype(np.uint64)
        seed_Y1, stream_Y1 = params_Y["seed"][:, None], params_Y["sample_idx"][:, None] + _DRAFTING
        u_YN = philox.uniform(seed_Y1, stream_Y1, position_YN)
        drawn_Y, row_Y, on_device_YN = upload([drawn, row_Y, u_YN], logits_SV.device)
        u_Y = on_device_YN.gather(1, num_new_S[drawn_Y].unsqueeze(1)).squeeze(1)
        prob_YV = _distribution(logits_SV[drawn_Y], params_Y)
        self._prob_MKV[row_Y, k] = prob_YV
        return token_S.scatter(0, drawn_Y, draw_from(prob_YV, u_Y))

    def accept_or_redraw(
        self, logits_YV: Tensor, row_Y: np.ndarray, draft_idx_Y: np.ndarray, position_Y: np.ndarray, u_Y: np.ndarray
    ) -> Tensor:
        """int64 [Y]: the drafts that are accepted, and other tokens in place of those that are rejected.

        logits_YV: after bias. draft_idx_Y: int64, which of the row's drafts. position_Y: uint64, of the token among
        the generated. u_Y: float64, what the token would be drawn with if there were no draft.
        """
        params_Y = self._rows.sampling_M[row_Y]
        accept_Y = philox.uniform(params_Y["seed"], params_Y["sample_idx"] + _ACCEPTING, position_Y)
        at_Y, k_Y, bound_Y, redraw_Y = upload([row_Y, draft_idx_Y, accept_Y, u_Y], logits_YV.device)
        token_Y = self._token_MK[at_Y, k_Y]
        p_YV, q_YV = _distribution(logits_YV, params_Y), self._prob_MKV[at_Y, k_Y]
        p_Y, q_Y = (prob_YV.gather(1, token_Y.unsqueeze(1)).squeeze(1) for prob_YV in (p_YV, q_YV))
        rest_YV = (p_YV - q_YV).clamp_(min=0)
        # Where p and q are equal nothing is left, and only rounding can reject a draft.
        rest_YV = torch.where(rest_YV.sum(dim=-1, keepdim=True) > 0, rest_YV, p_YV)
        return torch.where(bound_Y * q_Y < p_Y, token_Y, draw_from(rest_YV, redraw_Y))


def _distribution(logits_YV: Tensor, params_Y: np.ndarray) -> Tensor:
    """What the sampler draws from, summing to 1."""
    names = ("temperature", "min_p", "top_k", "top_p")
    temperature_Y, min_p_Y, top_k_Y, top_p_Y = upload([params_Y[name].copy() for name in names], logits_YV.device)
    truncates = bool((params_Y["top_k"] > 0).any() or (params_Y["top_p"] < 1).any())
    prob_YV = kept_probs(logits_YV, temperature_Y, min_p_Y, top_k_Y, top_p_Y, truncates)
    return prob_YV / prob_YV.sum(dim=-1, keepdim=True)
