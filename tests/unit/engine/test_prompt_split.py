"""How prompts are cut into pieces: each token once, equal work, and nothing where it would not pay."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eprt.config import EngineConfig
from eprt.engine.cache_layout import CacheLayout
from eprt.engine.prompt_split import ChunkOffer, ChunkPiece, Team, load_change

MOST = 512


@st.composite
def steps(draw) -> tuple[Team, list[int], list[ChunkOffer], list[bool]]:
    """A team, and what all ranks of the group have to compute."""
    num_ranks, size = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    offers = [ChunkOffer(draw(st.integers(0, 5000)), draw(st.integers(0, MOST))) for _ in range(num_ranks)]
    num_tokens = [offer.num_tokens + draw(st.integers(0, MOST - offer.num_tokens)) for offer in offers]
    team = Team.of_rank(draw(st.integers(0, num_ranks - 1)), num_ranks, size, MOST, draw(st.integers(1, 40)))
    return team, num_tokens, offers, draw(st.lists(st.booleans(), min_size=num_ranks, max_size=num_ranks))


@given(steps())
def test_every_token_has_one_rank(step):
    team, num_tokens, offers, alive = step
    pieces = team.split(num_tokens, offers, alive)
    ranks = [rank for rank in team.ranks if alive[rank]]
    assert all(piece.owner in ranks and piece.rank in ranks and piece.num_tokens > 0 for piece in pieces)
    for owner in {piece.owner for piece in pieces}:
        of_owner = [piece for piece in pieces if piece.owner == owner]
        start, count = offers[owner]
        assert [piece.end for piece in of_owner[:-1]] == [piece.start for piece in of_owner[1:]]
        assert (of_owner[0].start, of_owner[-1].end) == (start, start + count)
        assert of_owner[0].rank == of_owner[-1].rank == owner, "it begins there and is sampled there"
        assert count >= team.least * len(ranks)
    if pieces:
        after = [num_tokens[rank] + load_change(pieces, rank) for rank in ranks]
        assert sum(after) == sum(num_tokens[rank] for rank in ranks)
        assert max(after) <= MOST and max(after) < max(num_tokens[rank] for rank in ranks)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("start", [0, 3000])
def test_work_is_even(size, start):
    """Tokens, and the tokens that these look back at."""
    team = Team.of_rank(1, size, size, 2048, 16)
    offers = [ChunkOffer()] * (size - 1) + [ChunkOffer(start, 2048)]
    pieces = team.split([0] * (size - 1) + [2048], offers, [True] * size)
    tokens = [sum(p.num_tokens for p in pieces if p.rank == rank) for rank in range(size)]
    contexts = [sum(sum(range(p.start, p.end)) for p in pieces if p.rank == rank) for rank in range(size)]
    assert max(tokens) - min(tokens) <= 2
    assert max(contexts) < 1.01 * min(contexts)


def test_busy_ranks_get_less_and_even_steps_stay():
    team = Team.of_rank(0, 2, 2, MOST, 16)
    (first, guest, last) = team.split([400, 100], [ChunkOffer(0, 400), ChunkOffer()], [True, True])
    assert guest.rank == 1 and guest.num_tokens == pytest.approx(150, abs=2)
    assert first == ChunkPiece(0, 0, 0, first.end) and last.end == 400
    both = [ChunkOffer(0, 400), ChunkOffer(7, 400)]
    assert team.split([400, 400], both, [True, True]) == []  # each has its own
    assert team.split([400, 0], [ChunkOffer(0, 400), ChunkOffer()], [True, False]) == []  # nobody is there to help
    assert team.split([31, 0], [ChunkOffer(0, 31), ChunkOffer()], [True, True]) == []  # too short


@pytest.mark.parametrize(("field", "named"), [("indexer", "V3.2, whose attention has an indexer"), ("v4", "V4")])
def test_models_with_other_caches_are_refused(field, named):
    model: Any = SimpleNamespace(**{"indexer": None, "v4": None, field: object()})
    with pytest.raises(ValueError, match=f"--prompt-ranks 2: .* not with {named}; leave it out"):
        CacheLayout.for_model(EngineConfig("model", prompt_ranks=2), model, torch.bfloat16)
