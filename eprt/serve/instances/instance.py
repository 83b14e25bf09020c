"""Instance: one group of ranks among several: its pool, and what its choice depends on. Knows nothing of others."""

import time

from eprt.serve.instances.scores import PrefillRate, StepModel
from eprt.serve.options import InstanceName
from eprt.serve.ranks.pool import RankPool

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
        self.steps = StepModel()

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
    def predicted_step_s(self) -> float:
        """Of its slowest rank, with what is there now."""
        router = self.pool.router
        return self.steps.predict_ms(max(router.num_requests), max(router.num_tokens)) / 1e3

    def learn_step(self) -> None:
        """Its latest statistics tell how long its steps take."""
        stats = self.pool.stats
        if stats:
            rows = max(each.num_running_now for each in stats)
            self.steps.add_step(rows, max(self.pool.router.num_tokens), max(each.last_step_s for each in stats))
