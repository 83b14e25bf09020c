"""PendingMessage: a point-to-point message between ranks that is under way."""

from typing import Protocol


class PendingMessage(Protocol):
    """What isend and irecv of a group return."""

    def test(self) -> bool:
        """Whether the message is done; never blocks. Raises ConnectionError when it can no longer finish."""
        ...

    def cancel(self) -> None:
        """Gives up a receive: its buffer will not be written any more."""
        ...
