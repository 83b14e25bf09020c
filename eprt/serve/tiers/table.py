"""TierTable: which tier a request gets: by its service_tier, its key, or else the server's default.

OpenAI's words have a meaning on every server with tiers: auto is the key's tier, else the default; default is the
default; priority is the first tier that the key may ask for; flex is the last. A key with a tier opens that and those
behind it. Knows nothing of what a tier changes.
"""

from collections.abc import Sequence
from dataclasses import replace

from eprt.engine.sampling_params import SamplingParams
from eprt.serve.errors import ApiError, invalid, quoted
from eprt.serve.tiers.tier import Tier

_WORDS = ("auto", "default", "priority", "flex")
# In the engine's priority a tier comes first, then what the request says.
_TIER_SHIFT = 48
_MOST = (1 << _TIER_SHIFT - 1) - 1


class TierTable:
    """Of one server.

    Args:
        tiers: in the order in which they go first; empty: all requests are alike.
        default: name of the tier for those who say nothing; "": the last one.
    """

    def __init__(self, tiers: Sequence[Tier] = (), default: str = ""):
        self.tiers = tuple(tiers)
        self._by_name = {tier.name: tier for tier in tiers}
        self._default = self._by_name[default] if default else tiers[-1] if tiers else None

    def choose_tier(self, asked: str | None, of_key: str | None = None) -> Tier | None:
        """None on a server without tiers. ApiError for a name that nobody has, or that the key does not open.

        Args:
            asked: the request's service_tier.
            of_key: name of the tier of its key; None: the key has none, and opens all.
        """
        if self._default is None:
            if asked not in (None, "auto", "default"):
                what = "this server has no tiers (--tier); must be auto or default. To go first use priority"
                raise invalid("service_tier", f"service_tier={quoted(asked)}: {what}")
            return None
        best = self._by_name[of_key] if of_key is not None else self.tiers[0]
        if asked in self._by_name:
            return self._opened(self._by_name[asked], best)
        if asked is None or asked == "auto":
            return best if of_key is not None else self._default
        if asked not in _WORDS:
            names = ", ".join((*_WORDS, *(tier.name for tier in self.tiers if tier.name not in _WORDS)))
            raise invalid("service_tier", f"service_tier={quoted(asked)}: must be one of {names}")
        if asked == "default":
            return max(self._default, best, key=lambda tier: tier.rank)
        return best if asked == "priority" else self.tiers[-1]

    def _opened(self, tier: Tier, best: Tier) -> Tier:
        if tier.rank < best.rank:
            message = f"service_tier={quoted(tier.name)}: this key is for {best.name} and the tiers behind it"
            raise ApiError(403, message, code="tier_not_allowed", kind="permission_error", param="service_tier")
        return tier


def in_tier(params: SamplingParams, tier: Tier) -> SamplingParams:
    """As the engine runs a request of the tier: no priority of a request passes those of a tier before. ApiError."""
    if abs(params.priority) > _MOST:
        what = f"with tiers of service it must be in -{_MOST}..{_MOST}"
        raise invalid("priority", f"priority={params.priority}: {what}")
    return replace(params, priority=(tier.rank << _TIER_SHIFT) + params.priority)
