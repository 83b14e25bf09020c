"""Chooser: which instance gets a sequence.

Roles are preferences, for an engine can do all: a decode instance computes a prompt itself where no prefill instance is
open or its prefix cache lacks few tokens of it; a prefill instance goes on with its sequences where no decode instance
is open. Knows nothing of sequences or connections.
"""

import random
from collections.abc import Callable, Sequence

from eprt.serve.instances.instance import Instance
from eprt.serve.instances.scores import best_of, choose
from eprt.serve.options import ServeOptions
from eprt.serve.tiers.forecast import check_step
from eprt.serve.tiers.tier import Tier


class Chooser:
    """Of one server. living: its instances now."""

    def __init__(self, living: Callable[[], list[Instance]], options: ServeOptions):
        self._living, self._options = living, options
        self._rng = random.Random(0)

    def _open(self, role: str) -> list[Instance]:
        return [one for one in self._living() if one.role == role and one.is_open]

    def choose_any(
        self, token_ids: Sequence[int], cache_key: str | None = None, tier: Tier | None = None
    ) -> tuple[Instance, bool] | None:
        """Who begins a sequence, and whether it hands the sequence over; None where nobody is open. A sequence of a
        tier goes where its first token comes in time, if it does so anywhere: prompts of tiers behind wait for it."""
        prefills, decodes = self._open("prefill"), self._open("decode")
        if not prefills:
            chosen = self.choose_decode(token_ids, tier)
            return None if chosen is None else (chosen, False)

        number = tier.rank if tier else 0

        def missing(instance: Instance) -> int:
            return instance.pool.router.predict(token_ids, cache_key, number)[2]

        def prefill_ms(instance: Instance) -> float:
            _, charged, uncached = instance.pool.router.predict(token_ids, cache_key, number)
            return instance.rate.predict_ms(charged + uncached)

        def first_token_s(instance: Instance) -> float:
            rank, _, uncached = instance.pool.router.predict(token_ids, cache_key, number)
            return instance.forecast.first_token_times(rank, tier, uncached)[0]

        def is_late(instance: Instance) -> bool:
            return tier is not None and first_token_s(instance) > tier.ttft_s

        near = [one for one in decodes if missing(one) <= self._options.local_prefill_tokens]
        in_time = [one for one in prefills if not is_late(one)]
        if in_time:
            near = [one for one in near if not is_late(one)]
        if near:
            fewest = min(map(missing, near))
            nearest = [one for one in near if missing(one) == fewest]
            return self._choose_among(nearest, len(token_ids), tier), False
        if tier is not None:
            prefills = best_of(in_time or prefills, first_token_s)
        return choose(prefills, prefill_ms, self._rng), bool(decodes)

    def check_tier(self, tier: Tier, chosen: Instance, token_ids: Sequence[int], cache_key: str | None) -> None:
        """ApiError 429 where a limit of the tier would be missed. chosen: who would begin."""
        rank, _, uncached = chosen.pool.router.predict(token_ids, cache_key, tier.rank)
        chosen.forecast.check_first_token(tier, rank, uncached)
        decodes = self._open("decode") or [chosen]
        check_step([one.forecast for one in decodes], tier, len(token_ids))

    def choose_decode(self, token_ids: Sequence[int], tier: Tier | None = None) -> Instance | None:
        """Who goes on with a sequence: among those with room for it, where its tier's time per token and those of the
        tiers before it last, the least by --decode-balance."""
        decodes = self._open("decode")
        return self._choose_among(decodes, len(token_ids), tier) if decodes else None

    def _choose_among(self, decodes: list[Instance], num_tokens: int, tier: Tier | None) -> Instance:
        fits = [one for one in decodes if _has_room(one, num_tokens)]
        if tier is not None:
            fits = [one for one in fits if one.forecast.broken_tier(tier, num_tokens) is None] or fits
        score = _SCORES[self._options.decode_balance]
        return choose(fits or decodes, lambda one: score(one, num_tokens), self._rng)


def _has_room(instance: Instance, num_tokens: int) -> bool:
    router, infos = instance.pool.router, instance.pool.infos
    return min(router.num_tokens) + num_tokens <= min(info.kv_tokens for info in infos)


def _with_one_more(instance: Instance, num_tokens: int) -> tuple[int, int]:
    """Most rows and tokens of a rank, once the sequence is on the one that the router would take."""
    router = instance.pool.router
    rank = min(range(len(router.num_tokens)), key=lambda r: router.num_tokens[r])
    rows, tokens = list(router.num_requests), list(router.num_tokens)
    rows[rank] += 1
    tokens[rank] += num_tokens
    return max(rows), max(tokens)


def _step_ms(instance: Instance, num_tokens: int) -> float:
    """Of the slowest rank: all ranks of an instance wait for it."""
    return instance.steps.predict_ms(*_with_one_more(instance, num_tokens))


def _fullest_rank(instance: Instance, num_tokens: int) -> float:
    return _with_one_more(instance, num_tokens)[1]


def _most_rows(instance: Instance, num_tokens: int) -> float:
    return _with_one_more(instance, num_tokens)[0]


_SCORES = {"step": _step_ms, "kv": _fullest_rank, "batch": _most_rows}
