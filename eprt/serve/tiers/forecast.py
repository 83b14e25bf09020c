"""Forecast: when a request that comes now would get its first token from a group of ranks, and how long tokens take.

Both are learned from what the group does, so nothing is refused before it was measured. A limit that a request would
miss even alone is no reason to send it away: coming later would not help. Knows nothing of HTTP or of keys.
"""

import math
from collections.abc import Iterable, Sequence

from eprt.engine.router import Router
from eprt.serve.errors import ApiError
from eprt.serve.tiers.backlog import Backlog
from eprt.serve.tiers.fitted_seconds import FittedSeconds
from eprt.serve.tiers.step_model import StepModel
from eprt.serve.tiers.tier import Tier

# Seconds to a first token before any was measured: of itself, of a token of the prompts ahead.
_PRIOR_S = (0.02, 1e-3)
_LEARNING = 0.1  # weight of the latest sequence in the mean duration


class Forecast:
    """Of one group of ranks.

    Args:
        router: of the same group.
        max_running: sequences that a rank computes at once.
    """

    def __init__(self, router: Router, tiers: Sequence[Tier], max_running: int):
        self.steps = StepModel()
        self.backlog = Backlog(len(router.num_tokens), max(1, len(tiers)))
        self._router, self._tiers, self._max_running = router, tiers, max_running
        self._first = FittedSeconds(_PRIOR_S, (1.0, 1e-3), forgetting=0.98)
        self._sequence_s = 1.0  # mean time that a sequence keeps its row

    # -- what is there --

    def start(self, request_id: str, rank: int, tier: Tier | None, num_tokens: int) -> None:
        """A sequence begins here, or goes on. num_tokens: that must be computed before its next token."""
        self.backlog.charge(request_id, rank, tier.rank if tier else 0, num_tokens)

    def on_token(self, request_id: str, took_s: float) -> None:
        """Its first token here has come. took_s: since start()."""
        charge = self.backlog.compute(request_id)
        if charge is not None:
            waited_s = self._wait_for_row_s(charge.rank, charge.tier, 0)
            self._first.add_measurement(max(took_s - waited_s, 0.0), charge.num_ahead)

    def end(self, request_id: str, took_s: float | None = None) -> None:
        """It has ended here. took_s: since its first token, if it is done; None: it goes on elsewhere, or had none."""
        self.backlog.release(request_id)
        if took_s is not None:
            self._sequence_s += _LEARNING * (took_s - self._sequence_s)

    def add_step(self, num_rows: int, took_s: float) -> None:
        """num_rows: that the fullest rank runs."""
        self.steps.add_step(num_rows, max(self._router.num_tokens), took_s)

    # -- what would be --

    def first_token_s(self, rank: int, tier: int, num_tokens: int) -> float:
        """Of a sequence of this tier with so many tokens to compute, which comes now."""
        ahead = self.backlog.tokens_ahead(rank, tier)
        return self._first.predict_s(ahead + num_tokens) + self._wait_for_row_s(rank, tier, 1)

    def first_token_times(self, rank: int, tier: Tier | None, num_tokens: int) -> tuple[float, float]:
        """As first_token_s(), and the same if the sequence were alone here."""
        now_s = self.first_token_s(rank, tier.rank if tier else 0, num_tokens)
        return now_s, self._first.predict_s(num_tokens)

    def _wait_for_row_s(self, rank: int, tier: int, num_more: int) -> float:
        """Until so many sequences have ended that one of this tier runs."""
        num_over = self.backlog.rows_ahead(rank, tier) + num_more - self._max_running
        return max(num_over, 0) * self._sequence_s / self._max_running

    def step_s(self, num_tokens: int = 0) -> float:
        """Of the slowest rank; num_tokens: of one more sequence, 0 for none."""
        router = self._router
        rows, tokens = list(router.num_requests), list(router.num_tokens)
        if num_tokens:
            rank = min(range(len(tokens)), key=tokens.__getitem__)
            rows[rank] += 1
            tokens[rank] += num_tokens
        return self.steps.predict_ms(min(max(rows), self._max_running), max(tokens)) / 1e3

    def check_first_token(self, tier: Tier, rank: int, num_tokens: int) -> None:
        """ApiError 429 where a sequence that comes now gets its first token too late, and a later one would not."""
        late_s, alone_s = self.first_token_times(rank, tier, num_tokens)
        if alone_s <= tier.ttft_s < late_s:
            raise _busy(tier, f"the first token would come after {late_s:.3g} s", tier.ttft_s, late_s - tier.ttft_s)

    def broken_tier(self, tier: Tier, num_tokens: int) -> Tier | None:
        """The tightest tier among this one and those before it that are here, if with one more sequence a token takes
        longer than it allows, and without the others' would not."""
        here = [self._tiers[i] for i in self.backlog.tiers_there() if i < tier.rank]
        tightest = min((tier, *here), key=lambda one: one.itl_s)
        alone_s = self.steps.predict_ms(1, num_tokens) / 1e3
        return tightest if alone_s <= tightest.itl_s < self.step_s(num_tokens) else None


def check_step(forecasts: Iterable[Forecast], tier: Tier, num_tokens: int) -> None:
    """ApiError 429 where in each of these groups tokens would take longer than their tiers allow."""
    broken, step_s = None, math.inf
    for forecast in forecasts:
        limit = forecast.broken_tier(tier, num_tokens)
        if limit is None:
            return
        if forecast.step_s(num_tokens) < step_s:
            broken, step_s = limit, forecast.step_s(num_tokens)
    if broken is not None:
        raise _busy(tier, f"with one more request a token would take {step_s:.3g} s", broken.itl_s, 1.0, broken)


def _busy(tier: Tier, what: str, limit_s: float, retry_s: float, broken: Tier | None = None) -> ApiError:
    whose = "its limit" if broken in (None, tier) else f"the limit of tier {broken.name}, which is served now,"
    seconds = max(1, min(60, math.ceil(retry_s)))
    message = f"tier {tier.name}: {what}; {whose} is {limit_s:g} s. Come back in {seconds} s, or ask for another tier"
    return ApiError(
        429, message, code="tier_busy", param="service_tier", kind="rate_limit_error", retry_after_s=seconds
    )
