"""Which tokens of a prompt's chunk each rank of a team computes. Arithmetic alone: every rank finds the same from the
same offers. Knows nothing of requests.

A chunk is cut into pieces twice: its first half in the order of the ranks, its owner first, and its second half in the
reverse order. So each rank has a piece near the beginning, whose tokens look back at little, and one near the end: in
sum, every rank's tokens have equally long contexts for their number. The owner has the chunk's first token and its last
one, from which it samples.

Ranks with tokens of their own get fewer. Where that would hardly shorten the step, nothing is split.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

# A split costs each layer a wait: it has to shorten the step, counted in tokens of the rank with the most, to so much.
_WORTH = (7, 8)


class ChunkOffer(NamedTuple):
    """The tokens of one rank's step that others could compute: those of one chunk of a prompt."""

    start: int = 0  # position of the first
    num_tokens: int = 0


class ChunkPiece(NamedTuple):
    """Positions start..end-1 of a prompt of rank owner, which rank computes."""

    owner: int
    rank: int
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def load_change(pieces: Sequence[ChunkPiece], rank: int) -> int:
    """By how many tokens the rank computes more than without the split."""
    return sum(((p.rank == rank) - (p.owner == rank)) * p.num_tokens for p in pieces)


@dataclass(frozen=True)
class Team:
    """Ranks that compute each other's prompts."""

    ranks: tuple[int, ...]
    most: int  # tokens that a rank can compute in a step
    least: int  # tokens of a chunk that is worth splitting, for each of the ranks

    @staticmethod
    def of_rank(rank: int, num_ranks: int, team_size: int, most: int, least: int) -> "Team":
        """Neighbours; the last team may be smaller."""
        first = rank - rank % team_size
        return Team(tuple(range(first, min(first + team_size, num_ranks))), most, least)

    def split(
        self, num_tokens_N: Sequence[int], offers_N: Sequence[ChunkOffer], alive_N: Sequence[bool]
    ) -> list[ChunkPiece]:
        """Of all offered chunks, in the order of their owners; none where nothing is to be split.

        num_tokens_N, offers_N: what each rank of the group has to compute in the step, and how much of that it offers.
        """
        ranks = [rank for rank in self.ranks if alive_N[rank]]
        owners = [rank for rank in ranks if offers_N[rank].num_tokens >= max(2, self.least * len(ranks))]
        if len(ranks) < 2 or not owners:
            return []
        load_of = {rank: num_tokens_N[rank] - (rank in owners) * offers_N[rank].num_tokens for rank in ranks}
        total = sum(num_tokens_N[rank] for rank in ranks)
        # What each rank lacks to have as many tokens as the others, times the number of ranks.
        room_of = {rank: max(0, total - len(ranks) * load_of[rank]) for rank in ranks}
        pieces: list[ChunkPiece] = []
        for owner in owners:
            at = ranks.index(owner)
            pieces += _cut(offers_N[owner], ranks[at:] + ranks[:at], room_of)
        for piece in pieces:
            load_of[piece.rank] += piece.num_tokens
        before, after = max(num_tokens_N[rank] for rank in ranks), max(load_of.values())
        return pieces if after <= self.most and _WORTH[1] * after <= _WORTH[0] * before else []


def _cut(offer: ChunkOffer, ranks: Sequence[int], room_of: dict[int, int]) -> list[ChunkPiece]:
    """ranks: the owner first."""
    first_half = offer.num_tokens // 2
    end = offer.start + offer.num_tokens
    pieces = []
    for rank, begin, until in _shares(first_half, ranks, room_of):
        pieces.append(ChunkPiece(ranks[0], rank, offer.start + begin, offer.start + until))
    for rank, begin, until in reversed(_shares(offer.num_tokens - first_half, ranks, room_of)):
        pieces.append(ChunkPiece(ranks[0], rank, end - until, end - begin))
    return _joined([piece for piece in pieces if piece.num_tokens])


def _joined(pieces: Sequence[ChunkPiece]) -> list[ChunkPiece]:
    """Neighbours of one rank, as those in the middle, are one piece."""
    joined = [pieces[0]]
    for piece in pieces[1:]:
        if piece.rank == joined[-1].rank:
            joined[-1] = joined[-1]._replace(end=piece.end)
        else:
            joined.append(piece)
    return joined


def _shares(num_tokens: int, ranks: Sequence[int], room_of: dict[int, int]) -> list[tuple[int, int, int]]:
    """(rank, begin, end) of each part of num_tokens, by the ranks' room; the first has one at least."""
    total = sum(room_of[rank] for rank in ranks)
    ends = [max(1, num_tokens * so_far // total) for so_far in accumulate(room_of[rank] for rank in ranks)]
    return list(zip(ranks, [0, *ends[:-1]], ends))
