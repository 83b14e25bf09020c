"""Generation: what comes back from the ranks for one client, until it ends or the client leaves.

Knows nothing of ranks or connections: who makes a Generation says how a sequence is aborted.
"""

import asyncio
from collections.abc import Callable

from eprt.engine.outputs import TokenOutput
from eprt.serve.errors import ApiError
from eprt.serve.tiers.metrics import RequestService
from eprt.serve.tiers.tier import Tier


class Generation:
    """The outputs of one client's sequences, in the order of arrival."""

    def __init__(self, abort: Callable[[str, str], None], service: RequestService | None = None):
        self._abort = abort  # ends the sequence of a request id for a reason; ended sequences are ignored
        self.service = service  # what its tier promises, and what it gets; None: the server has no tiers
        self.request_ids: list[str] = []  # of the sequences, by index
        self.num_moved = 0  # how often a sequence of it went on on another rank
        self._arrived: list[tuple[int, TokenOutput]] = []
        self._wake = asyncio.Event()
        self._error: ApiError | None = None

    @property
    def tier(self) -> Tier | None:
        return None if self.service is None else self.service.tier

    async def next_outputs(self) -> list[tuple[int, TokenOutput]]:
        """(index of the sequence, output) of all that has arrived, at least one. ApiError where ranks are lost."""
        await self._wake.wait()
        self._wake.clear()
        arrived, self._arrived = self._arrived, []
        if not arrived and self._error is not None:
            raise self._error
        if self._error is not None:
            self._wake.set()
        return arrived

    def abort(self, index: int, reason: str = "abort") -> None:
        """Ends one sequence; no more outputs come from it. Ended sequences are ignored. reason: for the metrics, as
        Sequences.end has it."""
        self._abort(self.request_ids[index], reason)

    def abort_all(self) -> None:
        for request_id in self.request_ids:
            self._abort(request_id, "abort")

    def add_output(self, index: int, output: TokenOutput) -> None:
        self._arrived.append((index, output))
        self._wake.set()

    def fail(self, error: ApiError) -> None:
        """From now on next_outputs() raises this error, once it has returned what had arrived."""
        self._error = error
        if self.service is not None:
            self.service.fail()
        self._wake.set()
