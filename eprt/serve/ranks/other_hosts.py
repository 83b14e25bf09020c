"""OtherHosts: what the launcher with the frontend knows of the launchers of other hosts. Knows nothing of how they
talk (hosts/)."""

from dataclasses import dataclass

from eprt.serve.ranks.slots import RankEnd


@dataclass(frozen=True)
class HostStop:
    """A signal has come there."""


@dataclass(frozen=True)
class HostLoss:
    """A launcher is gone, and with it whoever can end that host's ranks."""

    what: str  # in words

    def __str__(self) -> str:
        return self.what


HostEvent = HostStop | HostLoss | RankEnd


class OtherHosts:
    """Of a server of one host: none."""

    def filenos(self) -> list[int]:
        """Readable when something has happened."""
        return []

    def take_events(self) -> list[HostEvent]:
        """Those since the last call."""
        return []

    def tell_serving(self) -> None:
        """All ranks have loaded."""

    def tell_ended(self, status: int, reason: str) -> None:
        """The server has ended with this exit status. reason: in words, "" where it was told to stop."""
