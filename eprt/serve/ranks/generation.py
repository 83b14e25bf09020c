"""Generation: what comes back from the ranks for one client, until it ends or the client leaves."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eprt.engine.outputs import TokenOutput
from eprt.serve.errors import ApiError

if TYPE_CHECKING:
    from eprt.serve.ranks.pool import RankPool


@dataclass(slots=True)
class RunningSequence:
    """One sequence under way: whose it is, and when it last moved."""

    generation: "Generation"
    index: int
    rank: int
    started_s: float
    last_token_s: float | None = None


class Generation:
    """The outputs of one client's sequences, in the order of arrival."""

    def __init__(self, pool: "RankPool"):
        self._pool = pool
        self.request_ids: list[str] = []
        self._arrived: list[tuple[int, TokenOutput]] = []
        self._wake = asyncio.Event()
        self._error: ApiError | None = None

    async def next(self) -> list[tuple[int, TokenOutput]]:
        """(index of the sequence, output) of all that has arrived, at least one. ApiError when ranks are lost."""
        await self._wake.wait()
        self._wake.clear()
        arrived, self._arrived = self._arrived, []
        if not arrived and self._error is not None:
            raise self._error
        if self._error is not None:
            self._wake.set()
        return arrived

    def rank_of(self, index: int) -> int | None:
        """The rank that runs sequence `index`; None when it has ended."""
        return self._pool.router.rank_of(self.request_ids[index])

    def abort(self, index: int) -> None:
        """Ends one sequence; nothing more comes from it. Ended sequences are ignored."""
        self._pool.abort(self.request_ids[index])

    def abort_all(self) -> None:
        for request_id in self.request_ids:
            self._pool.abort(request_id)

    def add(self, index: int, output: TokenOutput) -> None:
        self._arrived.append((index, output))
        self._wake.set()

    def fail(self, error: ApiError) -> None:
        self._error = error
        self._wake.set()
