"""ElasticPool: what Elasticity needs of a RankPool. Knows nothing of how the pool does it."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from eprt.engine.router import Router
from eprt.serve.ranks import messages as msg
from eprt.serve.ranks.rank import Rank
from eprt.serve.ranks.roster import Roster
from eprt.serve.ranks.sequences import Add, Sequences


class ElasticPool(Protocol):
    """A pool whose ranks may be lost, come and leave."""

    num_ranks: int
    ranks: dict[int, Rank]
    state: str
    ready: asyncio.Event
    ended: asyncio.Event
    router: Router
    sequences: Sequences
    roster: Roster

    @property
    def infos(self) -> list[msg.EngineInfo]: ...
    @property
    def members(self) -> list[Rank]: ...
    @property
    def seq(self) -> int: ...

    def next_seq(self) -> int: ...
    def send_numbered(self, adds: list[Add]) -> None: ...
    @property
    def on_drain(self) -> Callable[[str, int], None]: ...
    @property
    def quiet_s(self) -> dict[int, float]: ...
    @property
    def culprit_of(self) -> Callable[[int], int]: ...
    def lose(self, who: Rank | str, what: str, details: str = "") -> None: ...
    def check_ended(self) -> None: ...
