"""Compressor (DeepSeek-V4): one cache entry from several tokens, by a softmax over them in each channel.

Of ratio 128: entry i pools tokens 128i..128i+127. Of ratio 4 windows overlap: every token has two sets of channels, and
entry i pools the first set of tokens 4i-4..4i-1 and the second set of tokens 4i..4i+3; entry 0 has no previous window.
Then a norm, and the rotation of the window's first position.

X entries, S tokens, D values of an entry. Knows nothing of where tokens and entries are kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt import ops
from eprt.layers.linear import Linear
from eprt.layers.norm import RMSNorm
from eprt.layers.rope import rotate_last
from eprt.ops.elementwise import Rotation

OVERLAPPING_RATIO = 4


@dataclass(frozen=True)
class CompressorWeights:
    values: Linear  # wkv, to the channels of a token
    gates: Linear  # wgate, likewise
    place_RC: Tensor  # ape: fp32 [ratio, channels], added to the gates by a token's place in its window
    norm: RMSNorm


class Compressor:
    """ratio: tokens from one entry to the next."""

    def __init__(self, ratio: int, entry_size: int, weights: CompressorWeights, cos_sin_PR: Tensor):
        self.ratio, self.entry_size, self.weights, self.cos_sin_PR = ratio, entry_size, weights, cos_sin_PR
        self.overlaps = ratio == OVERLAPPING_RATIO

    def project(self, h_TH: Tensor, position_T: Tensor) -> Tensor:
        """fp32 [T, 2, channels]: what the pooling needs of each token, values and gates."""
        w = self.weights
        values_TC, gates_TC = w.values(h_TH, torch.float32), w.gates(h_TH, torch.float32)
        return torch.stack((values_TC, gates_TC + w.place_RC[position_T % self.ratio]), dim=1)

    def first_needed(self, start: int) -> int:
        """The first token whose projection later entries need, when tokens up to start - 1 are there."""
        window = start // self.ratio * self.ratio
        return max(0, window - self.ratio) if self.overlaps else window

    def pool(self, states_S2C: Tensor, first: int, start: int, end: int) -> Tensor:
        """fp32 [X, D]: the entries whose windows end at tokens start..end-1, in order. states: projections of tokens
        first..end-1, first = first_needed(start)."""
        ratio, window, closed = self.ratio, start // self.ratio, end // self.ratio
        if closed <= window:
            return states_S2C.new_empty(0, self.entry_size)
        at = window * ratio - first
        tokens = states_S2C[at : at + (closed - window) * ratio].unflatten(0, (-1, ratio))
        if self.overlaps:
            tokens = torch.cat((self._previous(states_S2C, at, tokens), tokens[..., self.entry_size :]), dim=1)
        values, gates = tokens.unbind(dim=2)
        pooled_XD = (values * gates.softmax(dim=1)).sum(dim=1)
        position_X = torch.arange(window, closed) * ratio
        normed_XD = ops.rms_norm(pooled_XD, self.weights.norm.weight_H, self.weights.norm.eps)
        return rotate_last(normed_XD.unsqueeze(1), Rotation(self.cos_sin_PR, position_X, True)).squeeze(1)

    def _previous(self, states_S2C: Tensor, at: int, tokens_XR2C: Tensor) -> Tensor:
        """The first set of channels of each window's predecessor, [X, ratio, 2, D]."""
        first = states_S2C[at - self.ratio : at] if at else states_S2C.new_zeros(self.ratio, *states_S2C.shape[1:])
        if not at:
            first[:, 1] = -torch.inf  # no weight: a zero would get some
        previous = torch.cat((first.unsqueeze(0), tokens_XR2C[:-1]))
        return previous[..., : self.entry_size]
