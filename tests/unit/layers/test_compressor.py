"""Compressor against its formula, window by window, for every way to cut the tokens."""

import numpy as np
import pytest
import torch

from eprt.layers.compressor import Compressor, CompressorWeights, first_needed, tokens_of
from eprt.layers.norm import RMSNorm
from eprt.ops.turned_rows import turn_rows

D, TABLE = 8, torch.cat((torch.ones(600, 2), torch.zeros(600, 2)), dim=1)  # no rotation


def compressor(ratio: int) -> Compressor:
    channels = 2 * D if ratio == 4 else D
    place = torch.randn(ratio, channels, generator=torch.Generator().manual_seed(3))
    return Compressor(ratio, D, CompressorWeights(place, RMSNorm(torch.ones(D), 1e-6)), TABLE)


def expected(one: Compressor, values: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Entry by entry, channel by channel."""
    w, ratio = one.weights, one.ratio
    entries = []
    for i in range(len(values) // ratio):
        slots = [(t, D if ratio == 4 else 0) for t in range(i * ratio, (i + 1) * ratio)]
        if ratio == 4 and i:
            slots = [(t, 0) for t in range((i - 1) * ratio, i * ratio)] + slots
        entry = torch.zeros(D)
        for channel in range(D):
            scores = torch.stack([gates[t, c + channel] + w.place_RC[t % ratio, c + channel] for t, c in slots])
            parts = torch.stack([values[t, c + channel] for t, c in slots])
            entry[channel] = (scores.softmax(0) * parts).sum()
        entries.append(entry / (entry.square().mean() + 1e-6).sqrt())
    return torch.stack(entries)


def entries_of(one: Compressor, states: torch.Tensor, index_XR: np.ndarray, entry_X: np.ndarray) -> torch.Tensor:
    pooled_XD = one.pool(states, torch.from_numpy(index_XR))
    return turn_rows(pooled_XD.unsqueeze(1), one.rotation(torch.from_numpy(entry_X) * one.ratio), one.norm).squeeze(1)


@pytest.mark.parametrize(("ratio", "num"), [(4, 23), (128, 260)])
@pytest.mark.parametrize("chunk", [1, 3, 5, 127, 128, 129, 1000])
def test_entries_do_not_depend_on_how_tokens_are_cut(ratio, num, chunk):
    """From the tokens that are needed at each cut, and not a bit is different."""
    one, channels = compressor(ratio), 2 * D if ratio == 4 else D
    product = torch.randn(num, 2 * channels, generator=torch.Generator().manual_seed(0))
    states = one.states(product.clone(), torch.arange(num))
    entries = []
    for start in range(0, num, chunk):
        end, first = min(start + chunk, num), first_needed(ratio, start)
        assert start - first < 2 * ratio
        entry_X = np.arange(start // ratio, end // ratio)
        position_XR = tokens_of(ratio, entry_X)
        index_XR = np.where(position_XR < 0, -1, position_XR - first)
        entries.append(entries_of(one, states[first:end], index_XR, entry_X))
    all_X = np.arange(num // ratio)
    whole = entries_of(one, states, tokens_of(ratio, all_X).clip(min=-1), all_X)
    assert torch.equal(torch.cat(entries), whole)
    torch.testing.assert_close(whole, expected(one, *product.chunk(2, dim=1)), rtol=1e-4, atol=1e-5)
