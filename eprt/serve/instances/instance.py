"""Instance: one group of ranks among several: its pool, and what its choice depends on. Knows nothing of others."""

import time
from collections.abc import Iterable

from eprt.serve.instances.scores import PrefillRate
from eprt.serve.options import InstanceName
from eprt.serve.ranks.loading import loading_reason
from eprt.serve.ranks.pool import RankPool
from eprt.serve.tiers.forecast import Forecast
from eprt.serve.tiers.step_model import StepModel

STATES = ("loading", "ready", "draining", "lost")


class Instance:
    """One incarnation: its successor after a loss is another one with the same name.

    Args:
        first_rank: what is added to its ranks' numbers where those of all instances are shown.
    """

    def __init__(self, name: InstanceName, pool: RankPool, first_rank: int):
        self.name, self.pool, self.first_rank = name, pool, first_rank
        self.since_s = time.time()  # Unix time of its latest change of state
        self._state = "loading"
        self.rate = PrefillRate()

    def __str__(self) -> str:
        return self.name.name

    @property
    def role(self) -> str:
        return self.name.role

    @property
    def state(self) -> str:
        """Of STATES."""
        return self._state

    def set_state(self, state: str) -> None:
        self._state, self.since_s = state, time.time()

    @property
    def is_open(self) -> bool:
        """Whether it is given requests."""
        return self._state == "ready"

    @property
    def lives(self) -> bool:
        """Whether its ranks hear and answer."""
        return self._state in ("ready", "draining")

    @property
    def forecast(self) -> Forecast:
        assert self.pool.forecast is not None, "the pool of an instance has one"
        return self.pool.forecast

    @property
    def steps(self) -> StepModel:
        return self.forecast.steps


def fleet_loading_reason(instances: Iterable[Instance]) -> str:
    """Why a server does not serve yet: what all ranks have read, and whom it waits for."""
    there = list(instances)
    told = [rank.loading for one in there for rank in one.pool.ranks.values() if rank.loading]
    reason = loading_reason(told) if told else "the model is loading"
    ready, awaited = ([str(one) for one in there if one.is_open is is_open] for is_open in (True, False))
    if ready and awaited:
        reason += f"; ready: {', '.join(ready)}; awaited: {', '.join(awaited)}"
    return reason
