"""Compressor (DeepSeek-V4): one cache entry from several tokens, by a softmax over them in each channel.

Of ratio 128: entry i pools tokens 128i..128i+127. Of ratio 4 windows overlap: every token has two sets of channels, and
entry i pools the first set of tokens 4i-4..4i-1 and the second set of tokens 4i..4i+3; entry 0 has no previous window.
Then a norm, and the rotation of the window's first position.

X entries, S tokens, D values of an entry. Knows nothing of where tokens and entries are kept.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from eprt.layers.norm import RMSNorm
from eprt.ops import insert_states, pool_entries
from eprt.ops.elementwise import Rotation
from eprt.ops.token_states import token_states
from eprt.ops.turned_rows import RowNorm

OVERLAPPING_RATIO = 4


@dataclass(frozen=True)
class CompressorWeights:
    place_RC: Tensor  # ape: fp32 [ratio, channels], added to the gates by a token's place in its window
    norm: RMSNorm


class Compressor:
    """ratio: tokens from one entry to the next."""

    def __init__(self, ratio: int, entry_size: int, weights: CompressorWeights, cos_sin_PR: Tensor):
        self.ratio, self.entry_size, self.weights, self.cos_sin_PR = ratio, entry_size, weights, cos_sin_PR

    def states(self, product_TC: Tensor, position_T: Tensor) -> Tensor:
        """fp32 [T, 2, channels]: what the pooling needs of each token, values and gates.

        product_TC: of the token, wkv's and behind it wgate's; its memory becomes the result's.
        """
        return token_states(product_TC, self.weights.place_RC, position_T)

    def insert_states(self, slots_PSX: Tensor, slot_T: Tensor, product_TC: Tensor, position_T: Tensor) -> None:
        """Puts them into slots, page * S + place. slots_PSX: values and gates side by side."""
        insert_states(slots_PSX, slot_T, product_TC, self.weights.place_RC, position_T)

    def pool(self, states_S2C: Tensor, index_XR: Tensor) -> Tensor:
        """fp32 [X, D]: some entries, before norm and rotation, from what their tokens left; as of pool_entries. index:
        in the order of tokens_of()."""
        return pool_entries(states_S2C, index_XR, self.entry_size, index_XR.shape[1] - self.ratio)

    @property
    def norm(self) -> RowNorm:
        """Of pooled entries."""
        return RowNorm(self.weights.norm.eps, self.weights.norm.weight_H)

    def rotation(self, first_X: Tensor) -> Rotation:
        """Of entries whose windows begin at these positions."""
        return Rotation(self.cos_sin_PR, first_X, True)


def first_needed(ratio: int, start: int) -> int:
    """The first token whose projection later entries need, when tokens up to start - 1 are there."""
    window = start // ratio * ratio
    return max(0, window - ratio) if ratio == OVERLAPPING_RATIO else window


def tokens_of(ratio: int, entry_X: Any) -> Any:
    """[X, R]: positions of the tokens of which entries are made; negative ones, before the first token, count for
    nothing."""
    return entry_X[:, None] * ratio + np.arange(-tokens_before(ratio), ratio)


def tokens_before(ratio: int) -> int:
    """How many tokens of the previous window an entry is made of, too."""
    return ratio if ratio == OVERLAPPING_RATIO else 0
