"""Backlog: the sequences of a group of ranks by rank and tier, and the prompt tokens that wait to be computed there.

Knows nothing of time.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Charge:
    """One sequence under way."""

    rank: int
    tier: int  # rank of its tier
    num_tokens: int  # of its prompt that have to be computed; 0: its first token is there
    num_ahead: int  # tokens that had to be computed before its first one when it came, its own included


class Backlog:
    """Of one group of ranks. Each sequence is charged once, and released however it ends."""

    def __init__(self, num_ranks: int, num_tiers: int):
        self._tokens = [[0] * num_tiers for _ in range(num_ranks)]
        self._rows = [[0] * num_tiers for _ in range(num_ranks)]
        self._charges: dict[str, Charge] = {}

    def charge(self, request_id: str, rank: int, tier: int, num_tokens: int) -> None:
        """A sequence begins, or goes on, on this rank. Charged before: that is forgotten."""
        self.release(request_id)
        ahead = self.tokens_ahead(rank, tier) + num_tokens
        self._charges[request_id] = Charge(rank, tier, num_tokens, ahead)
        self._tokens[rank][tier] += num_tokens
        self._rows[rank][tier] += 1

    def compute(self, request_id: str) -> Charge | None:
        """Its first token has come. As it was charged; None where it was not, or its first token came before."""
        charge = self._charges.get(request_id)
        if charge is None or not charge.num_tokens:
            return None
        before = Charge(charge.rank, charge.tier, charge.num_tokens, charge.num_ahead)
        self._tokens[charge.rank][charge.tier] -= charge.num_tokens
        charge.num_tokens = 0
        return before

    def release(self, request_id: str) -> None:
        """It has ended here, in whatever way. May be called twice."""
        charge = self._charges.pop(request_id, None)
        if charge is not None:
            self._tokens[charge.rank][charge.tier] -= charge.num_tokens
            self._rows[charge.rank][charge.tier] -= 1

    def tokens_ahead(self, rank: int, tier: int) -> int:
        """That this rank computes before those of a sequence of this tier that comes now."""
        return sum(self._tokens[rank][: tier + 1])

    def rows_ahead(self, rank: int, tier: int) -> int:
        """Sequences there that do not give way to one of this tier."""
        return sum(self._rows[rank][: tier + 1])

    def tiers_there(self) -> list[int]:
        """The tiers that have a sequence on any rank."""
        return [tier for tier in range(len(self._rows[0])) if any(rows[tier] for rows in self._rows)]

    @property
    def num_tokens(self) -> list[int]:
        """That each rank has to compute."""
        return [sum(tokens) for tokens in self._tokens]
